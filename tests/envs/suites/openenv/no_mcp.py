"""Stands in for the packages fastmcp and mcp, which OpenEnv's server imports for tools. Ours have none."""

import sys
import types

for name in ("fastmcp", "fastmcp.client", "fastmcp.client.client", "mcp", "mcp.types"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["fastmcp"].Client = sys.modules["fastmcp"].FastMCP = object
sys.modules["fastmcp.client.client"].CallToolResult = object
sys.modules["mcp.types"].TextContent = object
