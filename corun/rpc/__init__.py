"""How processes call each other: servers, channels, credentials, encoding. Nothing here knows what is asked for."""
