//! Tests of the pages in a real browser, against the real scheduler and an API server in memory.
//!
//! `cargo test -p tessera-scheduler --test browser` runs all scenarios. Names after `--` select
//! scenarios, `--screenshots DIR` takes screenshots instead, and `--serve [NODES]` keeps a cluster
//! running. The tests need Chromium and its driver, and fail without them.

#![allow(clippy::print_stdout, reason = "a program that tells how its scenarios went")]

mod cluster;
mod pictures;
mod scenarios;
mod webdriver;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use self::webdriver::Browser;

fn main() -> Result<ExitCode> {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    let mut pictures = None;
    if let Some(place) = names.iter().position(|name| name == "--screenshots") {
        // Cargo runs tests in the folder of their crate, but the argument is relative to the
        // project.
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        pictures = Some(root.join(names.get(place + 1).context("--screenshots needs a folder")?));
        names.drain(place..=place + 1);
    }
    let serve = names.iter().position(|name| name == "--serve");
    let runtime = tokio::runtime::Runtime::new()?;
    if let Some(place) = serve {
        let nodes = names.get(place + 1).map(|count| count.parse()).transpose()?;
        return runtime.block_on(keep(nodes));
    }
    runtime.block_on(run(&names, pictures))
}

/// Keeps the cluster of the screenshots, or one with `nodes` nodes, running for work on the pages.
async fn keep(nodes: Option<usize>) -> Result<ExitCode> {
    let cluster = match nodes {
        Some(count) => pictures::large(count).await?,
        None => pictures::sample().await?,
    };
    println!("{}", cluster.replica.url(""));
    tokio::signal::ctrl_c().await?;
    Ok(ExitCode::SUCCESS)
}

async fn run(names: &[String], pictures: Option<PathBuf>) -> Result<ExitCode> {
    let browser = Browser::start().await?;
    let mut failed = 0;
    if let Some(folder) = pictures {
        pictures::take(&browser, &folder).await?;
    } else {
        for (name, scenario) in scenarios::ALL {
            if !names.is_empty() && !names.iter().any(|wanted| name.contains(wanted.as_str())) {
                continue;
            }
            reset(&browser).await?;
            let outcome = match scenario(&browser).await {
                Ok(()) => quiet(&browser).await,
                failed => failed,
            };
            match outcome {
                Ok(()) => println!("ok      {name}"),
                Err(error) => {
                    failed += 1;
                    println!("FAILED  {name}: {error:?}");
                }
            }
        }
    }
    browser.close().await?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Removes all traces of the previous scenario from the browser.
async fn reset(browser: &Browser) -> Result<()> {
    browser.open("about:blank").await?;
    browser.size(1280, 800).await?;
    browser.prefer("light").await?;
    browser.complaints().await.map(drop)
}

/// Checks that the browser logged no errors.
async fn quiet(browser: &Browser) -> Result<()> {
    let complaints = browser.complaints().await?;
    anyhow::ensure!(complaints.is_empty(), "the browser complains: {complaints:#?}");
    Ok(())
}
