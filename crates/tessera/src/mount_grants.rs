//! `tessera mount-grants`: mounts the memory in which the agent keeps what containers can write.
//!
//! The agent itself has no right to mount. This command runs before it, in an init container.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use tessera_agent::shell::grants_memory;
use tessera_node::tmpfs::{self, Mounting};

/// Mounts a size-limited tmpfs for the limits and accounts of containers, or resizes it
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera mount-grants                  # before tessera agent, as root: deploy/agent
  tessera mount-grants --size-mib 128   # more room, also while containers run")]
pub(crate) struct Arguments {
    /// Directory of the containers' limits, as in tessera agent
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/tessera/grants")]
    grants: PathBuf,

    /// Size of the tmpfs in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    size_mib: u64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let directory = grants_memory(&std::path::absolute(&arguments.grants)?);
    let size = arguments.size_mib;
    let mounting = tmpfs::ensure(&directory, size).with_context(|| {
        format!(
            "cannot mount {size} MiB at {}; this needs root and the capability SYS_ADMIN",
            directory.display()
        )
    })?;
    let done = match mounting {
        Mounting::Mounted => "mounted",
        Mounting::Resized => "was mounted, now",
    };
    crate::print(&format!("{}: {done} {size} MiB\n", directory.display()));
    Ok(ExitCode::SUCCESS)
}
