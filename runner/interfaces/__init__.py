"""What a plug-in may import: the interfaces that packages meet at, one module per subject."""
