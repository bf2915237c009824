"""`python -m dsv4_triton.autotune`: the same as `dsv4-triton tune`."""

from dsv4_triton.autotune.cli import app

if __name__ == "__main__":
    app(prog_name="python -m dsv4_triton.autotune")
