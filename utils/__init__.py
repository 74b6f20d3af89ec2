"""What several parts of the package need: the provenance record, and folders that are written whole."""
