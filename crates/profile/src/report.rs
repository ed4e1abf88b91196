//! A recorded profile, and its form in pprof's protobuf.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    time::{Duration, SystemTime},
};

use flate2::{Compression, write::GzEncoder};

use crate::{mappings::Mapping, message::Message};

/// Stacks of a process, sampled while it used the processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Time at which recording began.
    pub began: SystemTime,
    /// How long stacks were recorded.
    pub duration: Duration,
    /// Processor time between two samples.
    pub period: Duration,
    /// Addresses of each stack, the innermost first.
    pub stacks: Vec<Vec<u64>>,
    /// Files with the code, the program itself first.
    pub mappings: Vec<Mapping>,
}

/// Field numbers of `perftools.profiles.Profile` and of its parts.
mod field {
    pub(super) const SAMPLE_TYPE: u64 = 1;
    pub(super) const SAMPLE: u64 = 2;
    pub(super) const MAPPING: u64 = 3;
    pub(super) const LOCATION: u64 = 4;
    pub(super) const STRING: u64 = 6;
    pub(super) const TIME_NANOS: u64 = 9;
    pub(super) const DURATION_NANOS: u64 = 10;
    pub(super) const PERIOD_TYPE: u64 = 11;
    pub(super) const PERIOD: u64 = 12;
}

/// Strings of the table before the names of files. The first one must be empty.
const STRINGS: [&str; 5] = ["", "samples", "count", "cpu", "nanoseconds"];

impl Profile {
    /// Writes the profile as gzip-compressed protobuf.
    pub fn print(&self) -> io::Result<Vec<u8>> {
        let mut writer = GzEncoder::new(Vec::new(), Compression::fast());
        writer.write_all(&self.message().into_bytes())?;
        writer.finish()
    }

    fn message(&self) -> Message {
        let mut profile = Message::default();
        let [samples, cpu] = [value_type(1, 2), value_type(3, 4)];
        profile.message(field::SAMPLE_TYPE, &samples);
        profile.message(field::SAMPLE_TYPE, &cpu);
        let mut counts: BTreeMap<&[u64], u64> = BTreeMap::new();
        let mut locations: BTreeMap<u64, u64> = BTreeMap::new();
        for stack in &self.stacks {
            *counts.entry(stack).or_default() += 1;
            for address in stack {
                let next = locations.len() as u64 + 1;
                locations.entry(*address).or_insert(next);
            }
        }
        for (stack, count) in counts {
            let mut sample = Message::default();
            sample.numbers(1, stack.iter().filter_map(|address| locations.get(address).copied()));
            sample.numbers(2, [count, count.saturating_mul(nanos(self.period))]);
            profile.message(field::SAMPLE, &sample);
        }
        for ((id, name), mapping) in (1u64..).zip(STRINGS.len() as u64..).zip(&self.mappings) {
            let mut message = Message::default();
            let numbers = [id, mapping.start, mapping.end, mapping.offset, name];
            (1..).zip(numbers).for_each(|(field, number)| message.number(field, number));
            profile.message(field::MAPPING, &message);
        }
        for (address, id) in locations {
            let mut message = Message::default();
            message.number(1, id);
            message.number(2, self.mapping_of(address));
            message.number(3, address);
            profile.message(field::LOCATION, &message);
        }
        let files = self.mappings.iter().map(|mapping| mapping.file.as_str());
        for text in STRINGS.into_iter().chain(files) {
            profile.bytes(field::STRING, text.as_bytes());
        }
        let began = self.began.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        profile.number(field::TIME_NANOS, nanos(began));
        profile.number(field::DURATION_NANOS, nanos(self.duration));
        profile.message(field::PERIOD_TYPE, &cpu);
        profile.number(field::PERIOD, nanos(self.period));
        profile
    }

    /// Returns the number of the mapping with this address, or 0 if it is in none.
    fn mapping_of(&self, address: u64) -> u64 {
        let mut numbered = (1..).zip(&self.mappings);
        let found = numbered.find(|(_, mapping)| (mapping.start..mapping.end).contains(&address));
        found.map_or(0, |(number, _)| number)
    }
}

/// Returns the type of a value: places of its name and of its unit in the table of strings.
fn value_type(name: u64, unit: u64) -> Message {
    let mut message = Message::default();
    message.number(1, name);
    message.number(2, unit);
    message
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn equal_stacks_are_one_sample() {
        let mapping =
            |start: u64, file: &str| Mapping { start, end: start + 16, offset: 0, file: file.into() };
        let profile = Profile {
            began: SystemTime::UNIX_EPOCH + Duration::from_nanos(7),
            duration: Duration::from_nanos(5),
            period: Duration::from_nanos(3),
            stacks: vec![vec![33, 17], vec![33], vec![33, 17]],
            mappings: vec![mapping(16, "a"), mapping(32, "b")],
        };
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(&profile.print().unwrap()[..]).read_to_end(&mut bytes).unwrap();
        let expected: &[&[u8]] = &[
            b"\x0a\x04\x08\x01\x10\x02\x0a\x04\x08\x03\x10\x04",
            b"\x12\x07\x0a\x01\x01\x12\x02\x01\x03\x12\x08\x0a\x02\x01\x02\x12\x02\x02\x06",
            b"\x1a\x08\x08\x01\x10\x10\x18\x20\x28\x05\x1a\x08\x08\x02\x10\x20\x18\x30\x28\x06",
            b"\x22\x06\x08\x02\x10\x01\x18\x11\x22\x06\x08\x01\x10\x02\x18\x21",
            b"\x32\x00\x32\x07samples\x32\x05count\x32\x03cpu\x32\x0bnanoseconds\x32\x01a\x32\x01b",
            b"\x48\x07\x50\x05\x5a\x04\x08\x03\x10\x04\x60\x03",
        ];
        assert_eq!(bytes, expected.concat());
    }
}
