runs/
__pycache__/
