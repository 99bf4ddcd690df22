"""A step as a job shop (ranks are machines, F, I and W operations): orders made, and made better.

From outside: dispatch_rules, job_shop, list_scheduling, pattern_search, patterns, tabu_search.
"""
