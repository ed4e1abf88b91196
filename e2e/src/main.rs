//! `tessera-e2e` starts a real Kubernetes on this host and runs scenarios on it. `e2e/run` builds
//! what it needs and starts it.

#![allow(clippy::print_stdout, reason = "a command line program")]

mod enclosure;
mod harness;
mod inside;
mod runner;
mod scenarios;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

/// Runs scenarios on a real Kubernetes, each in its own enclosure
#[derive(Debug, Parser)]
#[command(name = "e2e/run")]
struct Arguments {
    /// Scenarios to run; all if none is named
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,

    /// List the scenarios
    #[arg(long)]
    list: bool,

    /// Without names: run the scenarios that need a real GPU
    #[arg(long)]
    gpu: bool,

    /// Write golden files again from the answers of the real programs
    #[arg(long)]
    record: bool,

    /// Directory of the Kubernetes programs
    #[arg(long, env = "TESSERA_E2E_PROGRAMS", hide = true)]
    programs: Option<PathBuf>,

    /// Stage of this process
    #[arg(long, value_enum, default_value = "outside", hide = true)]
    stage: Stage,

    /// Directory of the scenario
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Stage {
    /// Outside of the enclosure: runs the scenarios one after the other
    Outside,
    /// Entering the enclosure: joins its cgroups
    Entering,
    /// Entered the cgroups, which are the root of a new cgroup namespace
    Entered,
    /// Inside: the first process of the enclosure, which runs one scenario
    Inside,
}

fn main() -> Result<ExitCode> {
    let Arguments { scenarios, list, gpu, record, programs, stage, directory } = Arguments::parse();
    if list {
        scenarios::print_list();
        return Ok(ExitCode::SUCCESS);
    }
    let programs = programs.context("start this program with e2e/run, which passes --programs")?;
    let settings = runner::Settings { programs, record };
    match stage {
        Stage::Outside => runner::run(&scenarios::select(&scenarios, gpu)?, &settings),
        Stage::Entering => {
            let directory = directory.context("--directory is missing")?;
            enclosure::enter(&directory, &settings.arguments(&scenarios))?;
            Ok(ExitCode::FAILURE)
        }
        Stage::Entered => {
            let directory = directory.context("--directory is missing")?;
            enclosure::start(&directory, &settings.arguments(&scenarios))?;
            Ok(ExitCode::FAILURE)
        }
        Stage::Inside => {
            let directory = directory.context("--directory is missing")?;
            inside::run(&directory, &settings, scenarios::only(&scenarios)?)
        }
    }
}
