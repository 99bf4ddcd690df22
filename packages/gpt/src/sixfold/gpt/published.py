"""``python -m sixfold.gpt.published``: published speeds beside planned ones; the code is in plan/published_runs.py."""

from sixfold.gpt.plan.published_runs import beside_plans, table

if __name__ == "__main__":
    print(table(beside_plans()))
