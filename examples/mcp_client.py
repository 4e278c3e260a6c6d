"""Drives mcp_server with a client that no one here wrote: the SDK of the protocol's own authors.

usage: mcp_client.py PATH-OF-mcp_server STATE-DIRECTORY   (in a directory with a README that says v1)
"""

import asyncio
import os
import sys

from mcp import Client, StdioServerParameters


def check(holds, what):
    if not holds:
        raise SystemExit(f"not so: {what}")
    print(f"  ✓ {what}")


async def call(client, tool, **arguments):
    result = await client.call_tool(tool, arguments)
    if result.is_error:
        raise SystemExit(f"{tool}: {result.structured_content}")
    return result.structured_content


async def main(server, state):
    environment = {"SANDBOXER_STATE_DIR": state, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    parameters = StdioServerParameters(command=server, args=["mcp"], env=environment)
    async with Client(parameters) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        wanted = {"get_sandbox_status", "list_sandbox_snapshots", "snapshot_sandbox", "rewind_sandbox",
                  "fork_sandbox", "sandbox_history", "sandbox_exec", "sandbox_read_file",
                  "sandbox_write_file"}
        check(set(tools) == wanted, "every tool is offered")
        check(tools["rewind_sandbox"].annotations.destructive_hint, "a rewind is said to be destructive")

        status = await call(client, "get_sandbox_status")
        check(status["state"] == "ready", "the sandbox is ready")
        taken = await call(client, "snapshot_sandbox", label="good")
        await call(client, "sandbox_write_file", path="README", content="broken\n")
        run = await call(client, "sandbox_exec", command="cat README; exit 3")
        check((run["stdout"], run["exit_code"]) == ("broken\n", 3), "a command runs and its code is told")

        listed = await call(client, "list_sandbox_snapshots")
        check(listed["snapshots"][0]["label"] == "good", "the snapshot is listed")
        rewound = await call(client, "rewind_sandbox", snapshot_id=taken["snapshot_id"])
        check(rewound["generation"] == 2, "the sandbox is rewound")
        read = await call(client, "sandbox_read_file", path="README")
        check(read["content"] == "v1\n", "the file is as it was")
        fork = await call(client, "fork_sandbox", snapshot_id=taken["snapshot_id"], name="beside")
        check(fork["sandbox_id"] != status["sandbox_id"], "a fork is another sandbox")

        history = await call(client, "sandbox_history", limit=500)
        kinds = [event["kind"] for event in history["events"]]
        check("snapshotted" in kinds and "rewound" in kinds and kinds[0] == "requested",
              "the history has it all")

        wrong = await client.call_tool("rewind_sandbox", {"snapshot_id": "snp_nope"})
        check(wrong.is_error and "no snapshot" in wrong.structured_content["error"]["message"],
              "a mistake is answered with what to do")


asyncio.run(main(sys.argv[1], sys.argv[2]))
