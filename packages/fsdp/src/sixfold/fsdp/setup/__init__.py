"""From a module and options to a working engine: units, checks, start values.

From outside: build, meta_device, options, start_values, torch_options, unit_selection.
"""
