//! `kubectl inspect gpushare`.

use std::process::ExitCode;

use tessera_cli::Plugin;

fn main() -> ExitCode {
    tessera_cli::main(Plugin::Share)
}
