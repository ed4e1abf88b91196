//! `kubectl inspect gpu`, also as `kubectl inspect gputopology`.

use std::process::ExitCode;

use tessera_cli::Plugin;

fn main() -> ExitCode {
    tessera_cli::main(Plugin::Gpu)
}
