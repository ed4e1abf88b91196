//! The speed of kube-scheduler with an extender relative to a stock kube-scheduler, with the same
//! pods on the same nodes.

mod contender;
pub(super) mod measure;
mod requests;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;

use self::{
    contender::{Contender, PodKind},
    measure::{Measured, measure},
};
use super::Site;
use crate::harness::Harness;

/// Cluster sizes in nodes with 8 GPUs. The environment variable `TESSERA_E2E_NODES` sets others.
const NODES: &str = "100,500,5000";

/// Pods of one measurement. The environment variable `TESSERA_E2E_PODS` sets another number.
const PODS: usize = 1500;

/// Rounds in which the contenders alternate. The environment variable `TESSERA_E2E_ROUNDS` sets
/// another number.
const ROUNDS: usize = 2;

/// CPU time of kube-scheduler and the extender for a pod that requests GPUs, at most, as a multiple of what
/// a stock kube-scheduler needs. Rates are only reported: on a busy machine they vary too much.
const MAX_CPU_FACTOR_GPU: f64 = 2.0;

/// The same for a pod without GPUs, for which kube-scheduler does not call the extender.
const MAX_CPU_FACTOR_PLAIN: f64 = 1.5;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let site = Site::start(&harness, std::iter::empty()).await?;
    let sizes = std::env::var("TESSERA_E2E_NODES").unwrap_or_else(|_| NODES.to_owned());
    let sizes: Vec<usize> = sizes
        .split(',')
        .map(|size| size.trim().parse().with_context(|| format!("TESSERA_E2E_NODES: {size:?} is no number")))
        .collect::<Result<_>>()?;
    let (pods, rounds) = (setting("TESSERA_E2E_PODS", PODS)?, setting("TESSERA_E2E_ROUNDS", ROUNDS)?);
    let contenders = Contender::all()?;
    let (mut present, mut too_slow) = (0, Vec::new());
    for size in sizes {
        ensure!(size >= present, "TESSERA_E2E_NODES: write the sizes in ascending order");
        let nodes: Vec<Node> =
            (present..size).map(|number| contender::node(number, &contenders)).collect::<Result<_>>()?;
        site.cluster.create_all(&Api::<Node>::all(site.cluster.client()), nodes.into_iter()).await?;
        present = size;
        harness.note(&format!("{size} virtual nodes with 8 GPUs, {pods} pods in each measurement"));
        too_slow.extend(compare(&site, &contenders, size, pods, rounds).await?);
    }
    ensure!(too_slow.is_empty(), "{}", too_slow.join("\n"));
    Ok(())
}

/// Measures all contenders alternately and reports their mean speed. Returns what is too slow.
async fn compare(
    site: &Site,
    contenders: &[Contender],
    size: usize,
    pods: usize,
    rounds: usize,
) -> Result<Vec<String>> {
    let mut too_slow = Vec::new();
    let mut results: Vec<(&Contender, PodKind, Measured)> = Vec::new();
    for round in 0..rounds {
        for kind in PodKind::ALL {
            for contender in contenders.iter().filter(|contender| contender.is_measured(kind)) {
                let name = format!("{}-{kind}-{size}-{round}", contender.name);
                let measured = measure(site, contender, kind, &name, pods).await?;
                site.harness.note(&format!("{kind} pods, {}: {measured}", contender.name));
                results.push((contender, kind, measured));
            }
        }
    }
    for kind in PodKind::ALL {
        let mean = |wanted: &Contender, of: fn(&Measured) -> f64| {
            let its = results.iter().filter(|(of, its_kind, _)| of.name == wanted.name && *its_kind == kind);
            let values: Vec<f64> = its.map(|(_, _, measured)| of(measured)).collect();
            values.iter().sum::<f64>() / values.len() as f64
        };
        let rate = |contender| mean(contender, |measured| measured.rate);
        let cpu = |contender| mean(contender, Measured::scheduling_cpu);
        let stock = &contenders[0];
        for contender in contenders.iter().filter(|contender| contender.is_measured(kind)) {
            let cpu_factor = cpu(contender) / cpu(stock);
            let line = format!(
                "{size} nodes, {kind} pods, {}: {:.0} pods/s, {:.0} % of stock; CPU of scheduling {cpu_factor:.2} times stock",
                contender.name,
                rate(contender),
                rate(contender) / rate(stock) * 100.0
            );
            site.harness.note(&line);
            let most = match kind {
                PodKind::Gpu => MAX_CPU_FACTOR_GPU,
                PodKind::Plain => MAX_CPU_FACTOR_PLAIN,
            };
            if contender.is_shipped() && cpu_factor > most {
                too_slow.push(format!("{line}, more than {most}"));
            }
        }
    }
    Ok(too_slow)
}

fn setting(name: &str, default: usize) -> Result<usize> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}: {text:?} is no number")),
        Err(_) => Ok(default),
    }
}
