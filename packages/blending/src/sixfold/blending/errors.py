"""The one exception of this package (this file)."""


class BlendingError(ValueError):
    """A blend, a configuration or a state that cannot work: names the thing, its value, the rule and the remedy."""
