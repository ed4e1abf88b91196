//! One look at a GPU through NVML. Any call may fail by itself: what it would have told is then absent.

use std::{collections::HashMap, sync::Mutex, sync::PoisonError};

use nvml_wrapper::{
    Device, Nvml as Library,
    enum_wrappers::device::{Clock, EccCounter, MemoryError, Sampling, TemperatureSensor},
    enums::device::SampleValue,
    error::NvmlError,
    struct_wrappers::device::{MemoryInfo, Sample},
    structs::device::FieldId,
};
use tessera_core::gpu::GpuUuid;

use super::{
    profile::Readings,
    raw::{Entry, Raw},
};
use crate::gpus::{
    BusyTime, GpuMemory, GpuPower, GpuSample, GpusError, MigInstance, ProcessMemory, RemappedRows,
    SampleInterval, Sensors,
};

/// Fields without a function of their own.
const MEMORY_TEMPERATURE: u32 = 82;
const PCIE_REPLAYS: u32 = 94;
const AVERAGE_POWER: u32 = 185;
const NVLINK_SENT: u32 = 138;
const NVLINK_RECEIVED: u32 = 139;
const REMAPPED: [u32; 4] = [142, 143, 144, 145];
const FIELDS: [u32; 8] = [MEMORY_TEMPERATURE, PCIE_REPLAYS, NVLINK_SENT, NVLINK_RECEIVED, 142, 143, 144, 145];

/// How often the energy counter is read, in microseconds: a reading takes the processor four milliseconds.
const ENERGY_EVERY: u64 = 10_000_000;

/// How often the driver takes its samples, in microseconds. A shorter look waits for the next of them: none would name a process.
const SAMPLES_EVERY: u64 = 200_000;

/// What is kept between looks at a GPU.
#[derive(Debug, Default)]
struct Kept {
    /// The chip's counters.
    readings: Readings,
    /// Millijoules, and when they were read.
    energy: Option<(u64, u64)>,
    /// Whether there were processes.
    was_used: bool,
}

/// What is kept between looks at all GPUs.
#[derive(Debug, Default)]
pub(super) struct Samples(Mutex<HashMap<GpuUuid, Kept>>);

impl Samples {
    pub(super) fn take(
        &self,
        library: &'static Library,
        raw: Option<&Raw>,
        gpu: &GpuUuid,
        window: SampleInterval,
    ) -> Result<GpuSample, GpusError> {
        let lost = |error: NvmlError| GpusError::Driver { what: "about a GPU", reason: error.to_string() };
        let device = library.device_by_uuid(gpu.0.as_ref()).map_err(lost)?;
        // Every GPU can tell this, but for a few that share the machine's memory. If it fails otherwise, so would all.
        let memory = match device.memory_info() {
            Ok(info) => Some(memory(&info)),
            Err(NvmlError::NotSupported | NvmlError::NoPermission) => None,
            Err(error) => return Err(lost(error)),
        };
        // Not under the lock: a GPU that hangs must not hold up the others.
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = lock().remove(gpu).unwrap_or_default();
        let processes = processes(&device, raw);
        let mut sensors = sensors(&device);
        sensors.profile = kept.readings.of_card(library, &device);
        let instances = instances(library, &device, raw, &mut kept.readings);
        let is_used = processes.as_ref().is_none_or(|all| !all.is_empty());
        let counts = instances.is_empty() && window.now.saturating_sub(window.since) >= SAMPLES_EVERY * 2;
        let counted = sensors.profile.and_then(|profile| profile.graphics).filter(|_| counts);
        // Whoever came and went between two looks shows here.
        let rests = sensors.utilization == Some(0) && counted.is_none_or(|busy| busy < 0.01);
        let work = if rests && !is_used && !kept.was_used {
            BusyTime::none(window)
        } else {
            work(&device, raw, window, counted, sensors.utilization)
        };
        kept.was_used = is_used;
        let energy = kept.energy(window.now, &device);
        lock().insert(gpu.clone(), kept);
        Ok(GpuSample { memory, processes, work, energy, sensors, instances })
    }
}

impl Kept {
    /// The last reading of the energy counter: a new one if it is time.
    fn energy(&mut self, now: u64, device: &Device<'_>) -> Option<u64> {
        if self.energy.is_none_or(|(_, at)| now.abs_diff(at) >= ENERGY_EVERY) {
            let read = device.total_energy_consumption().ok().and_then(sane);
            self.energy = read.map(|millijoules| (millijoules, now));
        }
        self.energy.map(|(millijoules, _)| millijoules)
    }
}

fn memory(info: &MemoryInfo) -> GpuMemory {
    GpuMemory { total: info.total, used: info.used, free: info.free, reserved: info.reserved }
}

/// Who is on a GPU.
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

/// What a GPU draws: asked often, so by the cheapest way there is. The driver's own average takes microseconds (the energy
/// counter takes milliseconds). GPUs that have none keep readings of every 20 ms.
pub(super) fn power_of(library: &'static Library, gpu: &GpuUuid) -> Option<GpuPower> {
    let device = library.device_by_uuid(gpu.0.as_ref()).ok()?;
    let limit = f64::from(device.enforced_power_limit().ok()?) / 1e3;
    let told = device.field_values_for(&[FieldId(AVERAGE_POWER)]).unwrap_or_default().pop();
    let told = told.and_then(Result::ok).and_then(|field| number(field.value.ok()?));
    let average = told.or_else(|| mean(&device.samples(Sampling::Power, None).ok()?))? / 1e3;
    Some(GpuPower { average, limit })
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

/// What was computed. The chip's own counter, where there is one, is exact and costs little; the driver's samples take milliseconds.
fn work(
    device: &Device<'_>,
    raw: Option<&Raw>,
    window: SampleInterval,
    counted: Option<f64>,
    current: Option<u32>,
) -> BusyTime {
    let samples = || raw.and_then(|raw| raw.utilization(device, window.since));
    let card = if counted.is_some() { None } else { samples() };
    let measured = counted.or_else(|| current.map(|percent| f64::from(percent) / 100.0));
    let processes = raw.and_then(|raw| raw.process_utilization(device, window.since));
    BusyTime::of(window, card.as_deref(), measured, processes.as_deref())
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
    let errors = |kind, counter| device.total_ecc_errors(kind, counter).ok().and_then(sane);
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
        uncorrected_errors: errors(MemoryError::Uncorrected, EccCounter::Volatile),
        uncorrected_errors_ever: errors(MemoryError::Uncorrected, EccCounter::Aggregate),
        corrected_errors: errors(MemoryError::Corrected, EccCounter::Volatile),
        corrected_errors_ever: errors(MemoryError::Corrected, EccCounter::Aggregate),
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

/// The parts of a GPU that is cut up.
fn instances(
    library: &'static Library,
    device: &Device<'static>,
    raw: Option<&Raw>,
    readings: &mut Readings,
) -> Vec<MigInstance> {
    if !device.mig_mode().is_ok_and(|mode| mode.current == 1) {
        return Vec::new();
    }
    let mut counted = HashMap::new();
    // Parts may be missing in between.
    let parts = (0..device.mig_device_count().unwrap_or_default())
        .filter_map(|place| device.mig_device_by_index(place).ok());
    let mut instance = |part: Device<'_>| {
        let (gpu_instance, compute_instance) = raw.map(|raw| raw.instances(&part)).unwrap_or_default();
        Some(MigInstance {
            uuid: part.uuid().ok()?,
            profile: part.name().ok().as_deref().and_then(cut),
            gpu_instance,
            compute_instance,
            memory: part.memory_info().ok().as_ref().map(memory),
            // Several may compute on one with the same memory.
            counted: gpu_instance.and_then(|number| {
                *counted.entry(number).or_insert_with(|| readings.of_part(library, device, number))
            }),
        })
    };
    parts.filter_map(&mut instance).collect()
}

/// How a part is cut, by its name: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
fn cut(name: &str) -> Option<String> {
    name.rsplit_once(" MIG ").map(|(_, profile)| profile.to_owned())
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
    fn the_name_of_a_part_tells_how_it_is_cut() {
        assert_eq!(cut("NVIDIA A100-SXM4-40GB MIG 1g.5gb").as_deref(), Some("1g.5gb"));
        assert_eq!(cut("NVIDIA A100-SXM4-40GB"), None);
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
