"""An experiment and its rounds: settings, who takes part, the guard, the simulator. No files, no messages."""
