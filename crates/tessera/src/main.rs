//! The `tessera` binary: parses the command line, runs the command and exits.
//!
//! Exit codes: 0 success, 1 a negative answer, 2 invalid input.

mod agent;
mod defragment;
mod demo;
#[cfg(test)]
mod documentation;
mod host;
mod inventory;
mod log;
mod metrics;
mod migrate;
mod mount_grants;
mod old_flags;
mod place;
mod profile_page;
mod scheduler;
mod service_manager;
mod simulate;
mod topology;
mod values;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::error::{ContextKind, ContextValue};
use clap::{Parser, Subcommand};

/// Shares and places the GPUs of a Kubernetes cluster.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 110,
    arg_required_else_help = true,
    after_help = "First steps:
  tessera demo                                         run a simulated cluster with its dashboard
  nvidia-smi topo -m > node.txt                        record how the GPUs of a host are linked
  tessera place --topology node.txt --request whole:2  show which GPUs a job would get, and why
  tessera inventory                                    show the GPUs of this host

`tessera COMMAND --help` has more examples. Exit codes: 0 success, 1 a negative answer, 2 invalid input."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Agent(Box<agent::Arguments>),
    Defragment(defragment::Arguments),
    Demo(demo::Arguments),
    Inventory(inventory::Arguments),
    Metrics(metrics::Arguments),
    Migrate(migrate::Arguments),
    MountGrants(mount_grants::Arguments),
    Place(place::Arguments),
    Scheduler(Box<scheduler::Arguments>),
    Simulate(simulate::Arguments),
    Topology(topology::Arguments),
}

fn main() -> ExitCode {
    let outcome = match parse_command_line().command {
        Command::Agent(arguments) => agent::run(*arguments),
        Command::Defragment(arguments) => defragment::run(arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Inventory(arguments) => inventory::run(&arguments),
        Command::Metrics(arguments) => metrics::run(arguments),
        Command::Migrate(arguments) => migrate::run(arguments),
        Command::MountGrants(arguments) => mount_grants::run(&arguments),
        Command::Place(arguments) => place::run(&arguments),
        Command::Scheduler(arguments) => scheduler::run(*arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Topology(arguments) => topology::run(&arguments),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(2)
    })
}

/// Parses the command line, with the flags of the programs that Tessera replaces translated. Exits if it has a mistake.
fn parse_command_line() -> Arguments {
    let extra = std::env::var(old_flags::EXTRA_FLAGS).ok().filter(|extra| !extra.trim().is_empty());
    parse(extra.as_deref()).unwrap_or_else(|mut error| {
        if let Some(extra) = extra.filter(|_| error.use_stderr())
            && parse(None).err().is_none_or(|other| !is_same_mistake(&error, &other))
        {
            add_tip(&mut error, format!("the environment variable EXTRA_FLAGS adds these flags: {extra}"));
        }
        error.exit()
    })
}

/// Parses the command line with these flags of `EXTRA_FLAGS`.
fn parse(extra: Option<&str>) -> Result<Arguments, clap::Error> {
    let variable = |name: &str| match name {
        old_flags::EXTRA_FLAGS => extra.map(str::to_owned),
        _ => std::env::var(name).ok(),
    };
    Arguments::try_parse_from(old_flags::translate(std::env::args_os(), variable))
}

/// Returns whether two errors report the same mistake, also if the command lines have other flags besides.
fn is_same_mistake(one: &clap::Error, other: &clap::Error) -> bool {
    fn details(error: &clap::Error) -> impl Iterator<Item = (ContextKind, &ContextValue)> {
        error.context().filter(|(kind, _)| *kind != ContextKind::Usage)
    }
    one.kind() == other.kind() && details(one).eq(details(other))
}

/// Adds a tip below the message of an error, after those that are there.
fn add_tip(error: &mut clap::Error, tip: String) {
    let mut tips = match error.remove(ContextKind::Suggested) {
        Some(ContextValue::StyledStrs(tips)) => tips,
        _ => Vec::new(),
    };
    tips.push(tip.into());
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
}

/// Reads a text file. The error names the file.
fn read_file(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Writes to standard output. A closed pipe, as after `head`, is not an error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Arguments;

    #[test]
    fn the_command_line_definition_is_consistent() {
        Arguments::command().debug_assert();
    }
}
