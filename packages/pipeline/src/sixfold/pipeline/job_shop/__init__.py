"""job_shop."""
