from specact.links.link import load_link as load_link
from specact.links.model import Link as Link
from specact.links.model import LossyLink as LossyLink
from specact.links.model import MahimahiLink as MahimahiLink
from specact.links.model import OutageLink as OutageLink
from specact.links.model import SteadyLink as SteadyLink
from specact.links.model import TraceLink as TraceLink
from specact.links.model import round_trip as round_trip
