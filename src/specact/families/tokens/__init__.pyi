from specact.families.tokens.bundle import TokenBundle as TokenBundle
from specact.families.tokens.bundle import load_tokens as load_tokens
from specact.families.tokens.network import Cache as Cache
from specact.families.tokens.network import Reading as Reading
from specact.families.tokens.network import TokenNetworks as TokenNetworks
from specact.families.tokens.network import causal as causal
from specact.families.tokens.policy import TokenPolicy as TokenPolicy
