//! `tessera-e2e` starts a real Kubernetes on this host and runs scenarios on it. `e2e/run` builds
//! what it needs and starts it.

#![allow(clippy::print_stdout, reason = "a command line program")]

mod enclosure;
mod harness;
mod inside;
mod runner;
mod scenarios;

use std::{num::NonZeroUsize, path::PathBuf, process::ExitCode, thread::available_parallelism};

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

    /// Scenarios that run at the same time, by default one for each core; those that measure the host or use its GPU
    /// always run alone
    #[arg(long, value_name = "NUMBER")]
    jobs: Option<NonZeroUsize>,

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
    /// Outside of the enclosure: runs the scenarios
    Outside,
    /// Entering the enclosure: joins its cgroups
    Entering,
    /// Entered the cgroups, which are the root of a new cgroup namespace
    Entered,
    /// Inside: the first process of the enclosure, which runs one scenario
    Inside,
}

fn main() -> Result<ExitCode> {
    let Arguments { scenarios, list, gpu, jobs, record, programs, stage, directory } = Arguments::parse();
    if list {
        scenarios::print_list();
        return Ok(ExitCode::SUCCESS);
    }
    let programs = programs.context("start this program with e2e/run, which passes --programs")?;
    let mut settings = runner::Settings { programs, record, jobs: NonZeroUsize::MIN };
    match stage {
        Stage::Outside => {
            let scenarios = scenarios::select(&scenarios, gpu)?;
            if scenarios.len() > 1 {
                settings.jobs = jobs.or_else(|| available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN);
            }
            runner::run(&scenarios, &settings)
        }
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
