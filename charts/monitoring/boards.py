"""All dashboards."""

from monitoring.board import Board
from monitoring.fleet import fleet_board
from monitoring.job import job_board
from monitoring.node import node_board
from monitoring.windows import Windows


def boards(windows: Windows) -> tuple[Board, ...]:
    """Return the dashboards, from all jobs to one node."""
    return (fleet_board(windows), job_board(windows), node_board(windows))
