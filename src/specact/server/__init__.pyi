from specact.server.app import create_app as create_app
from specact.server.service import Service as Service
from specact.server.settings import ServerSettings as ServerSettings
