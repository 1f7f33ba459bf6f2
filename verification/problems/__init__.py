"""Problems that are larger than drawn Cases."""
