"""drafttrain: train, prove and export the small model that lets a large one speak faster."""

__version__ = "0.1.0"
