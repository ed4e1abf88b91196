//! The chip's profiling counters, available from Hopper on. Values are differences between two
//! readings.

use std::collections::HashMap;

use nvml_wrapper::{Device, GpmSample, Nvml as Library, enums::gpm::GpmMetricId, gpm::gpm_metrics_get};

use crate::gpus::ProfilingCounters;

/// Requested metrics. The answer has the same order.
const METRICS: [GpmMetricId; 10] = [
    GpmMetricId::GraphicsUtil,
    GpmMetricId::SmUtil,
    GpmMetricId::SmOccupancy,
    GpmMetricId::AnyTensorUtil,
    GpmMetricId::Fp64Util,
    GpmMetricId::Fp32Util,
    GpmMetricId::Fp16Util,
    GpmMetricId::DramBwUtil,
    GpmMetricId::PcieTxPerSec,
    GpmMetricId::PcieRxPerSec,
];

/// Last readings of the counters of a GPU and of its GPU instances.
#[derive(Debug, Default)]
pub(super) struct Readings {
    gpu: Option<GpmSample<'static>>,
    instances: HashMap<u32, GpmSample<'static>>,
}

impl Readings {
    /// Returns the counters of the GPU since the last reading.
    pub(super) fn of_gpu(
        &mut self,
        library: &'static Library,
        device: &Device<'static>,
    ) -> Option<ProfilingCounters> {
        if !device.gpm_support().unwrap_or(false) {
            return None;
        }
        let now = device.gpm_sample().ok()?;
        let profile = self.gpu.take().and_then(|before| between(library, &before, &now));
        self.gpu = Some(now);
        profile
    }

    /// Returns the counters of a GPU instance since the last reading.
    pub(super) fn of_instance(
        &mut self,
        library: &'static Library,
        device: &Device<'static>,
        gpu_instance: u32,
    ) -> Option<ProfilingCounters> {
        let now = device.gpm_mig_sample(gpu_instance).ok()?;
        let profile = self.instances.remove(&gpu_instance).and_then(|before| between(library, &before, &now));
        self.instances.insert(gpu_instance, now);
        profile
    }
}

fn between(
    library: &'static Library,
    before: &GpmSample<'static>,
    now: &GpmSample<'static>,
) -> Option<ProfilingCounters> {
    let values = gpm_metrics_get(library, before, now, &METRICS).ok()?;
    let values: Vec<Option<f64>> = values
        .into_iter()
        .map(|value| value.ok().map(|value| value.value).filter(|value| value.is_finite() && *value >= 0.0))
        .collect();
    let [graphics, sm, occupancy, tensor, fp64, fp32, fp16, dram, sent, received] = *values else {
        return None;
    };
    let ratio = |percent: Option<f64>| percent.map(|percent| (percent / 100.0).min(1.0));
    let bytes = |mebibytes: Option<f64>| mebibytes.map(|mebibytes| mebibytes * 1_048_576.0);
    Some(ProfilingCounters {
        graphics: ratio(graphics),
        sm: ratio(sm),
        occupancy: ratio(occupancy),
        tensor: ratio(tensor),
        fp64: ratio(fp64),
        fp32: ratio(fp32),
        fp16: ratio(fp16),
        dram: ratio(dram),
        pcie_sent: bytes(sent),
        pcie_received: bytes(received),
    })
}
