"""The frozen target: `load_target(TargetConfig(path=...))`."""
