"""From a module and options to a working engine: units, checks, start values."""
