//! `tessera-e2e` starts a real Kubernetes on this machine and runs scenarios on it. Use it through `e2e/run`, which builds
//! what it needs.

#![allow(clippy::print_stdout, reason = "a command line program")]

mod enclosure;
mod harness;
mod inside;
mod runner;
mod scenarios;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

/// Runs scenarios on a real Kubernetes, each in an enclosure of its own.
#[derive(Debug, Parser)]
#[command(name = "e2e/run")]
struct Arguments {
    /// What to run; everything if nothing is named.
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,

    /// Say what there is to run.
    #[arg(long)]
    list: bool,

    /// Write golden files anew from what the real programs say.
    #[arg(long)]
    record: bool,

    /// Where the Kubernetes programs lie.
    #[arg(long, env = "TESSERA_E2E_PROGRAMS", hide = true)]
    programs: Option<PathBuf>,

    /// On which side of the enclosure this process stands.
    #[arg(long, value_enum, default_value = "outside", hide = true)]
    stage: Stage,

    /// The scenario's directory, once it has one.
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Stage {
    /// Nothing is enclosed yet: this process runs the scenarios, one after the other.
    Outside,
    /// On the way in.
    Entering,
    /// This process is the first of the enclosure and runs one scenario.
    Inside,
}

fn main() -> Result<ExitCode> {
    let Arguments { scenarios, list, record, programs, stage, directory } = Arguments::parse();
    if list {
        scenarios::print_list();
        return Ok(ExitCode::SUCCESS);
    }
    let programs = programs.context("start this through e2e/run, which knows where the programs lie")?;
    let settings = runner::Settings { programs, record };
    match stage {
        Stage::Outside => runner::run(&scenarios::select(&scenarios)?, &settings),
        Stage::Entering => {
            let directory = directory.context("--directory is missing")?;
            enclosure::enter(&directory, &settings.arguments(&scenarios))?;
            Ok(ExitCode::FAILURE)
        }
        Stage::Inside => {
            let directory = directory.context("--directory is missing")?;
            inside::run(&directory, &settings, scenarios::only(&scenarios)?)
        }
    }
}
