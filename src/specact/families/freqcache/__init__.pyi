from specact.families.freqcache.bundle import Patches as Patches
from specact.families.freqcache.bundle import RefreshBundle as RefreshBundle
from specact.families.freqcache.bundle import load_refresh as load_refresh
from specact.families.freqcache.cached import FreqCached as FreqCached
from specact.families.freqcache.cached import Reuse as Reuse
from specact.families.freqcache.cached import Reused as Reused
