"""Sandbox for code that a model wrote, with limits and, by `bubblewrap`, separate namespaces.

    sandbox = Sandbox(SandboxSpec())                 # the kind, and limits
    sandbox.probe()                                  # once on each machine: ConfigError where it cannot be had
    ran = await sandbox.run("print(1 + 1)")          # SandboxResult(stdout="2\\n", stderr="", code=0, limit=None)

Other code calls `sandbox`. `sandbox_call` runs one call to its end and enforces its limits. `bubblewrap` makes the
namespaces, `interpreter` finds the files of Python for them and makes them readable, `seccomp` lists the system calls
that the kernel refuses. The kind `process_limits` has no namespaces, and hides nothing. `python_tool` is the tool.
"""
