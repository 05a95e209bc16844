"""Example backend plugin: runs the attempts of FineTuneJobs behind a REST service."""
