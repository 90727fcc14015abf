"""The sandbox: code that a model wrote runs here, bounded, and with nothing of this machine but an interpreter.

    sandbox = Sandbox(SandboxSpec())                 # the kind, and limits
    sandbox.probe()                                  # once on each machine: ConfigError where it cannot be had
    ran = await sandbox.run("print(1 + 1)")          # Ran(stdout="2\\n", stderr="", code=0, limit=None)

`limits` says what a call may take. `bubblewrap` builds the command that makes a room, `interpreter` finds the files of
the one that runs in there, `passage` opens the way to them, `seccomp` says what the kernel refuses, `room` starts,
watches and ends one; `process_limits` does without. `usage` measures what runs,
`inputs` what it is given, `call` sees one call through, `sandbox` is the door, `python` the tool.
"""
