"""Plain classes that do the work; Ray turns them into actors elsewhere."""
