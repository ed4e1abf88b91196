//! What a program is told about memory: its share, not the card.

use tessera_limits::budget::shown;

use crate::cuda::{Device, SUCCESS, Status};
use crate::door::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => info;
    cuMemGetInfo(free: *mut u32, total: *mut u32) => info_v1;
    cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) => total;
    cuDeviceTotalMem(bytes: *mut u32, device: Device) => total_v1;
}

unsafe fn info(
    driver: unsafe extern "C" fn(*mut usize, *mut usize) -> Status,
    free: *mut usize,
    total: *mut usize,
) -> Status {
    // SAFETY: passed on as they came.
    let status = unsafe { driver(free, total) };
    if status == SUCCESS && !free.is_null() && !total.is_null() {
        // SAFETY: written by the driver.
        let (card_free, card_total) = unsafe { (*free as u64, *total as u64) };
        if let Some((shown_free, shown_total)) = share(card_free, card_total) {
            // SAFETY: as above.
            unsafe { (*free, *total) = (narrow(shown_free), narrow(shown_total)) };
        }
    }
    status
}

unsafe fn info_v1(
    driver: unsafe extern "C" fn(*mut u32, *mut u32) -> Status,
    free: *mut u32,
    total: *mut u32,
) -> Status {
    // SAFETY: passed on as they came.
    let status = unsafe { driver(free, total) };
    if status == SUCCESS && !free.is_null() && !total.is_null() {
        // SAFETY: written by the driver.
        let (card_free, card_total) = unsafe { (u64::from(*free), u64::from(*total)) };
        if let Some((shown_free, shown_total)) = share(card_free, card_total) {
            // SAFETY: as above.
            unsafe { (*free, *total) = (narrow(shown_free), narrow(shown_total)) };
        }
    }
    status
}

unsafe fn total(
    driver: unsafe extern "C" fn(*mut usize, Device) -> Status,
    bytes: *mut usize,
    device: Device,
) -> Status {
    // SAFETY: passed on as they came.
    let status = unsafe { driver(bytes, device) };
    if status == SUCCESS
        && !bytes.is_null()
        && let Some(granted) = granted(device)
    {
        // SAFETY: written by the driver.
        unsafe { *bytes = (*bytes).min(narrow(granted)) };
    }
    status
}

unsafe fn total_v1(
    driver: unsafe extern "C" fn(*mut u32, Device) -> Status,
    bytes: *mut u32,
    device: Device,
) -> Status {
    // SAFETY: passed on as they came.
    let status = unsafe { driver(bytes, device) };
    if status == SUCCESS
        && !bytes.is_null()
        && let Some(granted) = granted(device)
    {
        // SAFETY: written by the driver.
        unsafe { *bytes = (*bytes).min(narrow(granted)) };
    }
    status
}

fn granted(device: Device) -> Option<u64> {
    let process = Process::get().ok()?;
    Some(process.granted(process.cards.of_device(device).ok()?))
}

/// Free and total of the current card, as this container has them.
fn share(card_free: u64, card_total: u64) -> Option<(u64, u64)> {
    let process = Process::get().ok()?;
    let card = process.cards.current()?.ok()?;
    process.memory.pools.settle_all(process);
    process.sweep();
    Some(shown(process.granted(card), process.held(card), card_total, card_free))
}

impl Process {
    /// What the container holds of a card, in ledgers or not.
    pub fn held(&self, card: usize) -> u64 {
        self.account.held(card).saturating_add(self.control.unledgered(card))
    }
}

fn narrow<T: TryFrom<u64> + Bounded>(number: u64) -> T {
    T::try_from(number).unwrap_or(T::MOST)
}

trait Bounded {
    const MOST: Self;
}

impl Bounded for u32 {
    const MOST: Self = Self::MAX;
}

impl Bounded for usize {
    const MOST: Self = Self::MAX;
}
