//! The wrapped functions: what the driver has, what we put in its place.

use std::ffi::{CStr, c_void};

use super::library::Entry;

/// A function of ours in front of one of the driver's.
#[derive(Debug)]
pub struct Hook {
    pub entry: &'static Entry,
    pub ours: *const c_void,
}

// SAFETY: addresses of functions, which never change.
unsafe impl Sync for Hook {}

/// All hooks, in tables.
static TABLES: [&[&[Hook]]; 3] =
    [crate::memory::TABLES, crate::compute::TABLES, &[super::proc_address::HOOKS, crate::nvml::HOOKS]];

/// The first hook that is asked for.
fn find(is_it: &mut dyn FnMut(&Hook) -> bool) -> Option<&'static Hook> {
    TABLES.into_iter().flatten().copied().flatten().find(|hook| is_it(hook))
}

/// Our function in place of the driver's `address`, if that is exactly one we wrap. `name` is without version; it
/// decides where the driver has one body for several names.
pub fn in_place_of(name: &CStr, address: *mut c_void) -> Option<*mut c_void> {
    let wraps = |hook: &Hook| std::ptr::eq(hook.entry.address_if_loaded(), address);
    let is_named = |hook: &Hook| hook.entry.name.to_bytes().starts_with(name.to_bytes());
    let named = find(&mut |hook| wraps(hook) && is_named(hook));
    named.or_else(|| find(&mut |hook| wraps(hook))).map(|hook| hook.ours.cast_mut())
}

/// The same, for a look-up by name: only hooks of this name are compared.
pub fn in_place_of_named(name: &CStr, address: *mut c_void) -> Option<*mut c_void> {
    find(&mut |hook| hook.entry.name == name)
        .filter(|hook| std::ptr::eq(hook.entry.address_if_loaded(), address))
        .map(|hook| hook.ours.cast_mut())
}

/// Exported functions that stand before the driver's. Each is given the driver's function first, then what the program
/// passed.
macro_rules! hooks {
    ($library:ident: $($name:ident $arguments:tt => $body:expr;)*) => {
        $($crate::entry::table::hook! { $name $arguments => $body })*

        #[allow(non_upper_case_globals, reason = "named like the functions")]
        mod entries {
            use $crate::entry::library::{Entry, Of, named};
            $(pub(super) static $name: Entry = Entry::new(named(concat!(stringify!($name), "\0")), Of::$library);)*
        }

        pub static HOOKS: &[$crate::entry::table::Hook] = &[
            $($crate::entry::table::Hook {
                entry: &entries::$name,
                ours: $name as *const std::ffi::c_void,
            },)*
        ];
    };
}
pub(crate) use hooks;

/// One of them.
macro_rules! hook {
    ($name:ident ( $($argument:ident : $type:ty),* $(,)? ) => $body:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::cuda::Status {
            let address = entries::$name.address();
            if address.is_null() {
                return $crate::cuda::NOT_SUPPORTED;
            }
            type Form = unsafe extern "C" fn($($type),*) -> $crate::cuda::Status;
            // SAFETY: the driver's function of this name has this form.
            let driver = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Form>(address) };
            #[allow(unused_unsafe, reason = "a body written in place is no unsafe function")]
            // SAFETY: the program keeps the rules of the driver's function.
            unsafe { $body(driver, $($argument),*) }
        }
    };
}
pub(crate) use hook;
