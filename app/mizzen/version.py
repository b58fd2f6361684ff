"""The version, where every layer may read it: also without any installed metadata."""

__version__ = "0.1.0"
