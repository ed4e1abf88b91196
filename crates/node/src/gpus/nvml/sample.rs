//! Samples a GPU through NVML. Each call may fail on its own, and its values are then absent.

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

/// IDs of NVML fields that have no function of their own.
const MEMORY_TEMPERATURE: u32 = 82;
const PCIE_REPLAYS: u32 = 94;
const AVERAGE_POWER: u32 = 185;
const NVLINK_SENT: u32 = 138;
const NVLINK_RECEIVED: u32 = 139;
const REMAPPED: [u32; 4] = [142, 143, REMAPPING_PENDING, 145];

/// NVML's field that is 1 while a remapping of memory rows waits for a reset.
pub(super) const REMAPPING_PENDING: u32 = 144;
const FIELDS: [u32; 8] = [MEMORY_TEMPERATURE, PCIE_REPLAYS, NVLINK_SENT, NVLINK_RECEIVED, 142, 143, 144, 145];

/// Time between two readings of the energy counter in microseconds. A reading costs four
/// milliseconds of CPU time.
const ENERGY_INTERVAL_US: u64 = 10_000_000;

/// Time between two driver samples in microseconds. In a shorter interval, no sample names a
/// process.
const DRIVER_SAMPLE_INTERVAL_US: u64 = 200_000;

/// State kept between two samples of a GPU.
#[derive(Debug, Default)]
struct Kept {
    /// Last readings of the profiling counters.
    readings: Readings,
    /// Energy in millijoules, and the time of the reading.
    energy: Option<(u64, u64)>,
    /// True if the last sample had processes.
    was_used: bool,
}

/// State kept between two samples, for all GPUs.
#[derive(Debug, Default)]
pub(super) struct Samples(Mutex<HashMap<GpuUuid, Kept>>);

impl Samples {
    pub(super) fn take(
        &self,
        library: &'static Library,
        raw: Option<&Raw>,
        gpu: &GpuUuid,
        interval: SampleInterval,
    ) -> Result<GpuSample, GpusError> {
        let lost = |error: NvmlError| GpusError::Driver { what: "a GPU", reason: error.to_string() };
        let device = library.device_by_uuid(gpu.0.as_ref()).map_err(lost)?;
        // Only GPUs that share the host's memory do not support this call. If it fails for another
        // reason, the following calls would fail too.
        let memory = match device.memory_info() {
            Ok(info) => Some(memory(&info)),
            Err(NvmlError::NotSupported | NvmlError::NoPermission) => None,
            Err(error) => return Err(lost(error)),
        };
        // The state is taken out of the map, so that a GPU that hangs does not block the others on
        // the lock.
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = lock().remove(gpu).unwrap_or_default();
        let processes = processes(&device, raw);
        let mut sensors = sensors(&device);
        sensors.profile = kept.readings.of_gpu(library, &device);
        let instances = instances(library, &device, raw, &mut kept.readings);
        let is_used = processes.as_ref().is_none_or(|all| !all.is_empty());
        let counts = instances.is_empty()
            && interval.now.saturating_sub(interval.since) >= DRIVER_SAMPLE_INTERVAL_US * 2;
        let counted = sensors.profile.and_then(|profile| profile.graphics).filter(|_| counts);
        // A process that started and ended between two samples shows in the utilization.
        let is_idle = sensors.utilization == Some(0) && counted.is_none_or(|busy| busy < 0.01);
        let work = if is_idle && !is_used && !kept.was_used {
            BusyTime::idle(interval)
        } else {
            work(&device, raw, interval, counted, sensors.utilization)
        };
        kept.was_used = is_used;
        let energy = kept.energy(interval.now, &device);
        lock().insert(gpu.clone(), kept);
        Ok(GpuSample { memory, processes, work, energy, sensors, instances })
    }
}

impl Kept {
    /// Returns the energy counter, read again if the last reading is old enough.
    fn energy(&mut self, now: u64, device: &Device<'_>) -> Option<u64> {
        if self.energy.is_none_or(|(_, at)| now.abs_diff(at) >= ENERGY_INTERVAL_US) {
            let read = device.total_energy_consumption().ok().and_then(sane);
            self.energy = read.map(|millijoules| (millijoules, now));
        }
        self.energy.map(|(millijoules, _)| millijoules)
    }
}

fn memory(info: &MemoryInfo) -> GpuMemory {
    GpuMemory { total: info.total, used: info.used, free: info.free, reserved: info.reserved }
}

/// Returns the processes on a GPU.
pub(super) fn processes_on(
    library: &'static Library,
    raw: Option<&Raw>,
    gpu: &GpuUuid,
) -> Result<Vec<ProcessMemory>, GpusError> {
    let what = "the processes on a GPU";
    let failed = |error: NvmlError| GpusError::Driver { what, reason: error.to_string() };
    let device = library.device_by_uuid(gpu.0.as_ref()).map_err(failed)?;
    processes(&device, raw)
        .ok_or_else(|| GpusError::Driver { what, reason: "the process list is not available".to_owned() })
}

/// Returns the power draw of a GPU by the cheapest call, because it is read often. The driver's own
/// average takes microseconds, the energy counter takes milliseconds. GPUs without this average
/// keep samples of every 20 ms.
pub(super) fn power_of(library: &'static Library, gpu: &GpuUuid) -> Option<GpuPower> {
    let device = library.device_by_uuid(gpu.0.as_ref()).ok()?;
    let limit = f64::from(device.enforced_power_limit().ok()?) / 1e3;
    let field = device.field_values_for(&[FieldId(AVERAGE_POWER)]).unwrap_or_default().pop();
    let field = field.and_then(Result::ok).and_then(|field| number(field.value.ok()?));
    let average = field.or_else(|| mean(&device.samples(Sampling::Power, None).ok()?))? / 1e3;
    Some(GpuPower { average, limit })
}

/// Returns the mean of the last second.
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
    Some(merge_lists(raw?.processes(device)?.into_iter().map(process).collect()))
}

/// Merges entries of the same process from several lists and keeps the largest size.
fn merge_lists(mut all: Vec<ProcessMemory>) -> Vec<ProcessMemory> {
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

/// Returns the busy time of the interval. The chip's own counter is exact and cheap, if there is
/// one. The driver's samples take milliseconds.
fn work(
    device: &Device<'_>,
    raw: Option<&Raw>,
    interval: SampleInterval,
    counted: Option<f64>,
    current: Option<u32>,
) -> BusyTime {
    let samples = || raw.and_then(|raw| raw.utilization(device, interval.since));
    let samples = if counted.is_some() { None } else { samples() };
    let measured = counted.or_else(|| current.map(|percent| f64::from(percent) / 100.0));
    let processes = raw.and_then(|raw| raw.process_utilization(device, interval.since));
    BusyTime::of(interval, samples.as_deref(), measured, processes.as_deref())
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

/// Returns whether a value is real. NVML uses values close to the maximum for "not available" and
/// "not supported".
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

pub(super) fn whole(value: SampleValue) -> Option<u64> {
    let value = match value {
        SampleValue::U32(value) => Some(value).filter(is_small).map(u64::from),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    };
    value.and_then(sane)
}

/// Returns the MIG instances of a GPU.
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
    let parts = mig_devices(device);
    let mut instance = |part: Device<'_>| {
        let (gpu_instance, compute_instance) = raw.map(|raw| raw.instances(&part)).unwrap_or_default();
        Some(MigInstance {
            uuid: part.uuid().ok()?,
            profile: part.name().ok().as_deref().and_then(mig_profile),
            gpu_instance,
            compute_instance,
            memory: part.memory_info().ok().as_ref().map(memory),
            // Several compute instances may share one GPU instance, which is read once.
            counted: gpu_instance.and_then(|number| {
                *counted.entry(number).or_insert_with(|| readings.of_instance(library, device, number))
            }),
        })
    };
    parts.filter_map(&mut instance).collect()
}

/// Returns the MIG devices of a GPU, whose indexes may have gaps.
pub(super) fn mig_devices<'a>(device: &'a Device<'static>) -> impl Iterator<Item = Device<'static>> + 'a {
    let places = 0..device.mig_device_count().unwrap_or_default();
    places.filter_map(|place| device.mig_device_by_index(place).ok())
}

/// Returns the MIG profile in a device name such as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
pub(super) fn mig_profile(name: &str) -> Option<String> {
    name.rsplit_once(" MIG ").map(|(_, profile)| profile.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_a_process_of_several_lists_with_its_largest_size() {
        let process = |pid, bytes| ProcessMemory { pid, bytes, instance: None };
        let all = vec![process(2, None), process(1, Some(5)), process(2, Some(7)), process(1, Some(4))];
        assert_eq!(merge_lists(all), [process(1, Some(5)), process(2, Some(7))]);
    }

    #[test]
    fn reads_the_mig_profile_from_the_device_name() {
        assert_eq!(mig_profile("NVIDIA A100-SXM4-40GB MIG 1g.5gb").as_deref(), Some("1g.5gb"));
        assert_eq!(mig_profile("NVIDIA A100-SXM4-40GB"), None);
    }

    #[test]
    fn averages_the_last_second() {
        let sample = |timestamp, milliwatts| Sample { timestamp, value: SampleValue::U32(milliwatts) };
        assert_eq!(mean(&[]), None);
        let samples = [sample(0, 9), sample(1_000_000, 9), sample(1_500_000, 100), sample(2_000_000, 200)];
        assert_eq!(mean(&samples), Some(150.0));
    }

    #[test]
    fn ignores_sentinel_values() {
        for sentinel in [9_223_372_036_854_775_792, 9_223_372_036_854_775_795, u64::MAX] {
            assert_eq!(sane(sentinel), None);
        }
        assert_eq!(whole(SampleValue::U32(2_147_483_634)), None);
        assert_eq!(whole(SampleValue::U64(12)), Some(12));
        assert_eq!(whole(SampleValue::I64(-1)), None);
    }
}
