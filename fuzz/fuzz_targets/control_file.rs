//! The limits in a control file: the library must survive a file that an older or broken agent wrote.
#![no_main]

use std::os::unix::fs::FileExt;

use libfuzzer_sys::fuzz_target;
use tessera_fuzz::Grant;
use tessera_limits::limits::{self, ShareMeaning, WORDS};
use tessera_limits::{Bytes, GpuLimit, GrantLimits, UuidBytes, control, files};

/// The values of one GPU: UUID, memory, context, share and ceiling.
type Gpu = ([u8; 16], u64, u64, u32, u32);

fuzz_target!(|input: (u64, bool, Vec<Gpu>, Vec<(u8, u64)>, Vec<(u16, u8)>, &[u8])| {
    let (generation, is_throughput, gpus, word_changes, byte_changes, foreign) = input;
    let _ = control::parse_limits(foreign);

    // A file that the agent's own writer has made: whatever limits it is given, the library either reads them
    // back or rejects them.
    let gpus: Vec<GpuLimit> = gpus
        .into_iter()
        .map(|(uuid, memory, context, compute_percent, compute_ceiling_percent)| GpuLimit {
            uuid: UuidBytes(uuid),
            memory: Bytes(memory),
            context: Bytes(context),
            compute_percent: compute_percent % 128,
            compute_ceiling_percent: compute_ceiling_percent % 128,
        })
        .collect();
    let meaning = if is_throughput { ShareMeaning::Throughput } else { ShareMeaning::Time };
    let limits = GrantLimits { generation, meaning, gpus };
    Grant::with(|grant| {
        grant.control.write(&limits);
        let read = control::parse_limits(&grant.read(&files::control_path(grant.path())));
        let in_range = |gpu: &GpuLimit| {
            gpu.compute_percent <= gpu.compute_ceiling_percent && gpu.compute_ceiling_percent <= 100
        };
        let written = GrantLimits {
            gpus: limits.gpus.iter().take(tessera_limits::MAX_GPUS).copied().collect(),
            ..limits.clone()
        };
        if written.gpus.iter().all(in_range) {
            assert_eq!(read.as_ref(), Ok(&written));
        }

        // The same words with changes and a valid checksum reach the checks behind it.
        let mut words = limits.to_words();
        for (place, word) in word_changes {
            words[usize::from(place) % WORDS] = word;
        }
        limits::seal(&mut words);
        grant.control.write_words(&words);

        // Any change of bytes; both readers come to the same result.
        let path = files::control_path(grant.path());
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file exists");
        for (offset, byte) in byte_changes {
            let offset = u64::from(offset) % size_of::<control::Control>() as u64;
            file.write_all_at(&[byte], offset).expect("the file is writable");
        }
        let parsed = control::parse_limits(&grant.read(&path));
        if grant.control.is_known() {
            assert_eq!(parsed, grant.control.read());
        }
    });
});
