//! One look at a card through NVML. Any call may fail by itself: what it would have told is then absent.

use std::{collections::HashMap, sync::Mutex, sync::PoisonError};

use nvml_wrapper::{
    Device, GpmSample, Nvml as Library,
    enum_wrappers::device::{Clock, EccCounter, MemoryError, Sampling, TemperatureSensor},
    enums::{device::SampleValue, gpm::GpmMetricId},
    error::NvmlError,
    gpm::gpm_metrics_get,
    struct_wrappers::device::Sample,
    structs::device::FieldId,
};
use tessera_core::gpu::GpuUuid;

use super::raw::{Entry, Raw};
use crate::gpus::{
    CardMemory, CardPower, CardSample, GpusError, Instance, ProcessMemory, Profile, RemappedRows, Sensors,
    Window, Work,
};

/// Fields without a function of their own.
const MEMORY_TEMPERATURE: u32 = 82;
const PCIE_REPLAYS: u32 = 94;
const AVERAGE_POWER: u32 = 185;
const NVLINK_SENT: u32 = 138;
const NVLINK_RECEIVED: u32 = 139;
const REMAPPED: [u32; 4] = [142, 143, 144, 145];
const FIELDS: [u32; 8] = [MEMORY_TEMPERATURE, PCIE_REPLAYS, NVLINK_SENT, NVLINK_RECEIVED, 142, 143, 144, 145];

/// In this order in the answer.
const PROFILE: [GpmMetricId; 5] = [
    GpmMetricId::GraphicsUtil,
    GpmMetricId::AnyTensorUtil,
    GpmMetricId::DramBwUtil,
    GpmMetricId::PcieTxPerSec,
    GpmMetricId::PcieRxPerSec,
];

/// What is kept between looks.
#[derive(Debug, Default)]
pub(super) struct Samples {
    /// The chip's counters at the last look.
    profiles: Mutex<HashMap<GpuUuid, GpmSample<'static>>>,
}

impl Samples {
    pub(super) fn take(
        &self,
        library: &'static Library,
        raw: Option<&Raw>,
        gpu: &GpuUuid,
        window: Window,
    ) -> Result<CardSample, GpusError> {
        let lost = |error: NvmlError| GpusError::Driver { what: "about a GPU", reason: error.to_string() };
        let device = library.device_by_uuid(gpu.0.as_ref()).map_err(lost)?;
        // If this fails, so would all.
        let memory = match device.memory_info() {
            Ok(info) => Some(CardMemory {
                total: info.total,
                used: info.used,
                free: info.free,
                reserved: info.reserved,
            }),
            Err(error @ (NvmlError::GpuLost | NvmlError::Uninitialized)) => return Err(lost(error)),
            Err(_) => None,
        };
        let instances = instances(&device, raw);
        let mut sensors = sensors(&device);
        sensors.profile = self.profile(library, gpu, &device);
        Ok(CardSample {
            memory,
            processes: processes(&device, raw),
            work: work(&device, window, sensors.utilization),
            energy: device.total_energy_consumption().ok().and_then(sane),
            sensors,
            instances,
        })
    }

    /// What the chip counted between the last look and this one.
    fn profile(&self, library: &'static Library, gpu: &GpuUuid, device: &Device<'static>) -> Option<Profile> {
        if !device.gpm_support().unwrap_or(false) {
            return None;
        }
        let now = device.gpm_sample().ok()?;
        // Not under the lock: a card that hangs must not hold up the others.
        let lock = || self.profiles.lock().unwrap_or_else(PoisonError::into_inner);
        let before = lock().remove(gpu);
        let values = before.and_then(|before| gpm_metrics_get(library, &before, &now, &PROFILE).ok());
        lock().insert(gpu.clone(), now);
        let values: Vec<Option<f64>> = values?
            .into_iter()
            .map(|value| value.ok().map(|value| value.value).filter(|value| value.is_finite()))
            .collect();
        let [graphics, tensor, dram, sent, received] = *values else { return None };
        let ratio = |percent: Option<f64>| percent.map(|percent| percent / 100.0);
        let bytes = |mebibytes: Option<f64>| mebibytes.map(|mebibytes| mebibytes * 1_048_576.0);
        Some(Profile {
            graphics: ratio(graphics),
            tensor: ratio(tensor),
            dram: ratio(dram),
            pcie_sent: bytes(sent),
            pcie_received: bytes(received),
        })
    }
}

/// Who is on a card.
pub(super) fn processes_on(
    library: &'static Library,
    raw: Option<&Raw>,
    gpu: &GpuUuid,
) -> Result<Vec<ProcessMemory>, GpusError> {
    let what = "who is on a GPU";
    let failed = |error: NvmlError| GpusError::Driver { what, reason: error.to_string() };
    let device = library.device_by_uuid(gpu.0.as_ref()).map_err(failed)?;
    processes(&device, raw).ok_or_else(|| GpusError::Driver { what, reason: "it does not say".to_owned() })
}

/// What a card draws: asked often, so by the cheapest way there is. The driver's own average takes microseconds (the energy
/// counter takes milliseconds). Cards that have none keep readings of every 20 ms.
pub(super) fn power_of(library: &'static Library, gpu: &GpuUuid) -> Option<CardPower> {
    let device = library.device_by_uuid(gpu.0.as_ref()).ok()?;
    let limit = f64::from(device.enforced_power_limit().ok()?) / 1e3;
    let told = device.field_values_for(&[FieldId(AVERAGE_POWER)]).unwrap_or_default().pop();
    let told = told.and_then(Result::ok).and_then(|field| number(field.value.ok()?));
    let average = told.or_else(|| mean(&device.samples(Sampling::Power, None).ok()?))? / 1e3;
    Some(CardPower { average, limit })
}

/// The mean of the last second.
fn mean(samples: &[Sample]) -> Option<f64> {
    let last = samples.last()?.timestamp;
    let recent = samples.iter().rev().take_while(|sample| last.saturating_sub(sample.timestamp) < 1_000_000);
    let values: Vec<f64> = recent.filter_map(|sample| number(sample.value.clone())).collect();
    let count = u32::try_from(values.len()).ok().filter(|count| *count > 0)?;
    Some(values.iter().sum::<f64>() / f64::from(count))
}

fn processes(device: &Device<'_>, raw: Option<&Raw>) -> Option<Vec<ProcessMemory>> {
    let process =
        |entry: Entry| ProcessMemory { pid: entry.pid, bytes: entry.bytes, instance: entry.instance };
    Some(one_each(raw?.processes(device)?.into_iter().map(process).collect()))
}

/// Whoever is in several lists counts once, with the most that any says.
fn one_each(mut all: Vec<ProcessMemory>) -> Vec<ProcessMemory> {
    all.sort_by_key(|process| (process.pid, process.instance));
    all.dedup_by(|later, earlier| {
        let same = (later.pid, later.instance) == (earlier.pid, earlier.instance);
        if same {
            earlier.bytes = earlier.bytes.max(later.bytes);
        }
        same
    });
    all
}

fn work(device: &Device<'_>, window: Window, current: Option<u32>) -> Work {
    let card: Option<Vec<(u64, f64)>> = match device.samples(Sampling::GpuUtilization, window.since) {
        Ok(samples) => {
            let sample = |sample: Sample| {
                Some((sample.timestamp, number(sample.value)?)).filter(|(_, percent)| *percent <= 100.0)
            };
            Some(samples.into_iter().filter_map(sample).collect())
        }
        // Nothing new since then.
        Err(NvmlError::NotFound) => Some(Vec::new()),
        Err(_) => None,
    };
    let processes: Option<Vec<(u32, u64, u32)>> = match device.process_utilization_stats(window.since) {
        Ok(all) => Some(all.iter().map(|one| (one.pid, one.timestamp, one.sm_util)).collect()),
        // All are idle.
        Err(NvmlError::NotFound) => Some(Vec::new()),
        Err(_) => None,
    };
    Work::of(window, card.as_deref(), current, processes.as_deref())
}

fn sensors(device: &Device<'_>) -> Sensors {
    let utilization = device.utilization_rates().ok();
    let asked = FIELDS.map(FieldId);
    let fields: HashMap<u32, u64> = device
        .field_values_for(&asked)
        .unwrap_or_default()
        .into_iter()
        .flatten()
        .filter_map(|field| Some((field.field.0, whole(field.value.ok()?)?)))
        .collect();
    let field = |id: u32| fields.get(&id).copied();
    let [correctable, uncorrectable, pending, failed] = REMAPPED.map(field);
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    let remapped_rows = correctable.zip(uncorrectable).map(|(correctable, uncorrectable)| RemappedRows {
        correctable: small(correctable),
        uncorrectable: small(uncorrectable),
        pending: pending.is_some_and(|pending| pending > 0),
        failed: failed.is_some_and(|failed| failed > 0),
    });
    let errors = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    Sensors {
        utilization: utilization.as_ref().map(|rates| rates.gpu).filter(is_percent),
        memory_utilization: utilization.as_ref().map(|rates| rates.memory).filter(is_percent),
        encoder: device.encoder_utilization().ok().map(|info| info.utilization).filter(is_percent),
        decoder: device.decoder_utilization().ok().map(|info| info.utilization).filter(is_percent),
        temperature: device.temperature(TemperatureSensor::Gpu).ok().filter(is_small),
        memory_temperature: field(MEMORY_TEMPERATURE).map(small).filter(|degrees| *degrees > 0),
        power: device.power_usage().ok().filter(is_small),
        sm_clock: device.clock_info(Clock::SM).ok().filter(is_small),
        memory_clock: device.clock_info(Clock::Memory).ok().filter(is_small),
        pcie_replays: field(PCIE_REPLAYS),
        uncorrected_errors: errors.ok().and_then(sane),
        remapped_rows,
        clock_events: device.current_throttle_reasons().ok().map(|reasons| reasons.bits()),
        nvlink: field(NVLINK_SENT).zip(field(NVLINK_RECEIVED)).map(|(sent, received)| sent + received),
        profile: None,
    }
}

fn is_percent(value: &u32) -> bool {
    *value <= 100
}

/// Numbers close to the largest stand for "not there", "not supported" and the like.
fn is_small(value: &u32) -> bool {
    *value < 0x7fff_ff00
}

fn sane(value: u64) -> Option<u64> {
    Some(value).filter(|value| *value < 0x7fff_ffff_ffff_ff00)
}

fn number(value: SampleValue) -> Option<f64> {
    match value {
        SampleValue::F64(value) => Some(value),
        SampleValue::U32(value) => Some(f64::from(value)),
        SampleValue::U64(value) => u32::try_from(value).ok().map(f64::from),
        SampleValue::I64(value) => u32::try_from(value).ok().map(f64::from),
    }
}

fn whole(value: SampleValue) -> Option<u64> {
    let value = match value {
        SampleValue::U32(value) => Some(value).filter(is_small).map(u64::from),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    };
    value.and_then(sane)
}

/// The parts of a card that is cut up.
fn instances(device: &Device<'_>, raw: Option<&Raw>) -> Vec<Instance> {
    if !device.mig_mode().is_ok_and(|mode| mode.current == 1) {
        return Vec::new();
    }
    // Parts may be missing in between.
    let parts = (0..device.mig_device_count().unwrap_or_default())
        .filter_map(|place| device.mig_device_by_index(place).ok());
    parts
        .filter_map(|part| {
            let (gpu_instance, compute_instance) = raw.map(|raw| raw.instances(&part)).unwrap_or_default();
            let memory = part.memory_info().ok().map(|info| CardMemory {
                total: info.total,
                used: info.used,
                free: info.free,
                reserved: info.reserved,
            });
            Some(Instance { uuid: part.uuid().ok()?, gpu_instance, compute_instance, memory })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_in_several_lists_counts_once_with_the_most() {
        let process = |pid, bytes| ProcessMemory { pid, bytes, instance: None };
        let all = vec![process(2, None), process(1, Some(5)), process(2, Some(7)), process(1, Some(4))];
        assert_eq!(one_each(all), [process(1, Some(5)), process(2, Some(7))]);
    }

    #[test]
    fn the_mean_is_that_of_the_last_second() {
        let sample = |timestamp, milliwatts| Sample { timestamp, value: SampleValue::U32(milliwatts) };
        assert_eq!(mean(&[]), None);
        let samples = [sample(0, 9), sample(1_000_000, 9), sample(1_500_000, 100), sample(2_000_000, 200)];
        assert_eq!(mean(&samples), Some(150.0));
    }

    #[test]
    fn numbers_that_stand_for_something_else_are_none() {
        for sentinel in [9_223_372_036_854_775_792, 9_223_372_036_854_775_795, u64::MAX] {
            assert_eq!(sane(sentinel), None);
        }
        assert_eq!(whole(SampleValue::U32(2_147_483_634)), None);
        assert_eq!(whole(SampleValue::U64(12)), Some(12));
        assert_eq!(whole(SampleValue::I64(-1)), None);
    }
}
