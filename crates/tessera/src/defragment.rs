//! `tessera defragment`: `kubectl inspect gpu defragment` on a host without the kubectl plugins.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

/// Plans which pods to move so that waiting pods or a wanted shape fit
///
/// The same as `kubectl inspect gpu defragment`. Changes nothing without --apply. Exits with code 1 if no moves help.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera defragment                          # the moves that make room for the pods that wait
  tessera defragment --shape 2x8              # the moves that give two nodes 8 free GPUs each
  tessera defragment --apply                  # carry out the moves, after a question
  tessera defragment --shape 1x8 -o json      # for scripts")]
pub(crate) struct Arguments {
    #[command(flatten)]
    command: tessera_cli::DefragmentCommand,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    runtime.block_on(arguments.command.run())
}
