"""The road of a save and of a load: say what is wanted, agree, move bytes, commit or assemble."""
