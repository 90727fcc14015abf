"""The sandbox: code that a model wrote runs here, bounded, and with nothing of this machine but an interpreter.

    sandbox = Sandbox(SandboxSpec())                 # the kind, and limits
    sandbox.probe()                                  # once on each machine: ConfigError where it cannot be had
    ran = await sandbox.run("print(1 + 1)")          # SandboxResult(stdout="2\\n", stderr="", code=0, limit=None)

`sandbox_call` runs one call to its end, and keeps its limits. `bubblewrap` makes the namespaces, `interpreter` finds
the files of the Python in there and opens a way to them, `seccomp` says which system calls the kernel refuses.
`sandbox` has the calls that others make, and `process_limits`, which needs no namespaces; `python_tool` is the tool.
"""
