"""The sandbox: code that a model wrote runs here, bounded, and with nothing of this machine but an interpreter.

    sandbox = Sandbox(SandboxSpec())                 # the kind, and limits
    sandbox.probe()                                  # once on each machine: ConfigError where it cannot be had
    ran = await sandbox.run("print(1 + 1)")          # SandboxResult(stdout="2\\n", stderr="", code=0, limit=None)

`sandbox_call` sees one call through: what it may take, and what it takes. `bubblewrap` makes a room, `interpreter`
finds the files of the one that runs in there and opens the way to them, `seccomp` says what the kernel refuses;
`sandbox` is the door, and does without a room; `python_tool` is the tool.
"""
