"""The parts of a pool of processes, which `process_pool` puts together."""
