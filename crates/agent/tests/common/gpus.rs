//! GPUs that report when they are sampled.

use std::{collections::HashMap, ops::ControlFlow, sync::Arc};

use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::{
    DiscoveredGpus, GpuPower, GpuSample, Gpus, GpusError, Incident, ProcessMemory, SampleInterval,
};
use tokio::sync::watch;

use super::with_timeout;

/// Counts the samples of other GPUs, so that tests wait for samples without polling.
pub(crate) struct CountedGpus {
    inner: Arc<dyn Gpus>,
    /// Number of samples of each GPU that have begun.
    begun: watch::Sender<HashMap<GpuUuid, u64>>,
}

impl CountedGpus {
    pub(crate) fn new(inner: impl Gpus) -> Arc<Self> {
        Self::of(Arc::new(inner))
    }

    pub(crate) fn of(inner: Arc<dyn Gpus>) -> Arc<Self> {
        Arc::new(Self { inner, begun: watch::Sender::default() })
    }

    /// Returns the number of samples that have begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.borrow().values().sum()
    }

    /// Waits until every GPU has been sampled `times` times, and the exporter has the samples. Only
    /// samples that begin after this call count.
    pub(crate) async fn sampled(&self, times: u64) {
        let uuids: Vec<GpuUuid> = self.discover().unwrap().gpus.into_iter().map(|gpu| gpu.uuid).collect();
        let before = self.begun.borrow().clone();
        // A GPU is sampled by one thread, which begins a sample after it has stored the one before.
        let is_done = |begun: &HashMap<GpuUuid, u64>| {
            let count = |all: &HashMap<GpuUuid, u64>, gpu| all.get(gpu).copied().unwrap_or(0);
            uuids.iter().all(|gpu| count(begun, gpu) > count(&before, gpu) + times)
        };
        with_timeout("samples of all GPUs", self.begun.subscribe().wait_for(is_done)).await.unwrap();
    }

    /// Waits until samples have begun this many times.
    pub(crate) async fn until_begun(&self, times: u64) {
        let is_done = |begun: &HashMap<GpuUuid, u64>| begun.values().sum::<u64>() >= times;
        with_timeout("samples to begin", self.begun.subscribe().wait_for(is_done)).await.unwrap();
    }
}

impl Gpus for CountedGpus {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        self.inner.discover()
    }

    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError> {
        self.begun.send_modify(|begun| *begun.entry(gpu.clone()).or_default() += 1);
        self.inner.sample(gpu, interval)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        self.inner.processes(gpu)
    }

    fn power(&self, gpu: &GpuUuid) -> Option<GpuPower> {
        self.inner.power(gpu)
    }

    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError> {
        self.inner.watch(report)
    }

    fn have_device_nodes(&self) -> bool {
        self.inner.have_device_nodes()
    }
}
