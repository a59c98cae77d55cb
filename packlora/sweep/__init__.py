"""Jobs that join and leave a run while it trains, as somebody asks for it or a sweep decides. The rest of the package finds it
by name: see packlora/changes.py."""
