//! What the exporter says about a stretch of time, beside what the driver says.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::{task::JoinHandle, time::sleep};

use super::{bench::Bench, host::ask_gpu};

/// One scrape of the agent's metrics.
#[derive(Debug)]
pub(super) struct Page(String);

impl Page {
    pub(super) async fn read(bench: &Bench) -> Result<Self> {
        Ok(Self(bench.stage.page("/metrics").await?))
    }

    /// Returns the sum of all samples of a family, of one pod or of all.
    pub(super) fn sum(&self, family: &str, pod: Option<&str>) -> Option<f64> {
        let pod = pod.map(|pod| format!("pod=\"{pod}\""));
        let values: Vec<f64> = self
            .0
            .lines()
            .filter(|line| line.strip_prefix(family).is_some_and(|rest| rest.starts_with('{')))
            .filter(|line| pod.as_ref().is_none_or(|pod| line.contains(pod.as_str())))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse().ok())
            .collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    fn seconds(&self) -> Result<f64> {
        self.sum("tessera_gpu_sample_timestamp_seconds", None)
            .context("the exporter has no sample of the GPU")
    }
}

/// Two scrapes.
#[derive(Debug)]
pub(super) struct Between {
    pub(super) first: Page,
    pub(super) last: Page,
}

impl Between {
    /// Returns the growth of a counter per second.
    pub(super) fn rate(&self, family: &str, pod: Option<&str>) -> Result<f64> {
        let seconds = self.last.seconds()? - self.first.seconds()?;
        ensure!(seconds > 1.0, "the exporter has sampled for {seconds} s only");
        let last = self.last.sum(family, pod).with_context(|| format!("no {family} of {pod:?}"))?;
        // A series begins when its container does something.
        Ok((last - self.first.sum(family, pod).unwrap_or_default()) / seconds)
    }

    /// Checks that containers and remainder add up to the GPU: the families of the GPU, of containers and of
    /// the remainder.
    pub(super) fn adds_up(&self, gpu: &str, containers: &str, remainder: &str) -> Result<()> {
        let whole = self.rate(gpu, None)?;
        let parts = self.rate(containers, None)? + self.rate(remainder, None)?;
        ensure!(
            (whole - parts).abs() <= 1e-6 * whole.max(1.0),
            "{gpu} grows by {whole}, its parts by {parts}"
        );
        Ok(())
    }
}

/// The power of the GPU by the driver, sampled until it is asked for.
#[derive(Debug)]
pub(super) struct Power(JoinHandle<Result<Vec<f64>>>, tokio::sync::watch::Sender<bool>);

impl Power {
    pub(super) fn watch() -> Self {
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let task = tokio::task::spawn(async move {
            let mut watts = Vec::new();
            while !*stopped.borrow() {
                let sample = tokio::task::spawn_blocking(|| ask_gpu("power.draw.instant")).await??;
                watts.push(sample.trim().parse()?);
                sleep(Duration::from_millis(50)).await;
            }
            Ok(watts)
        });
        Self(task, stop)
    }

    /// Returns the mean in watts.
    pub(super) async fn mean(self) -> Result<f64> {
        self.1.send_replace(true);
        let watts = self.0.await??;
        #[expect(clippy::cast_precision_loss, reason = "a small count")]
        Ok(watts.iter().sum::<f64>() / watts.len() as f64)
    }
}
