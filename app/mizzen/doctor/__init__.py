"""``mizzen doctor``: what an operator checks first, before a model is loaded and inside the container too."""
