//! The table of hooks: each wrapped driver function with the function that replaces it.

use std::ffi::{CStr, c_void};

use super::library::DriverFunction;

/// A function of this library that wraps a driver function.
#[derive(Debug)]
pub struct Hook {
    pub function: DriverFunction,
    pub address: *const c_void,
}

// SAFETY: the address of a hook never changes, and that of a driver function is atomic.
unsafe impl Sync for Hook {}

/// All hooks of the library.
static TABLES: [&[&[Hook]]; 3] =
    [crate::memory::TABLES, crate::compute::TABLES, &[&super::proc_address::HOOKS, &crate::nvml::HOOKS]];

/// Returns the first hook that `matches` accepts.
fn find(matches: &mut dyn FnMut(&Hook) -> bool) -> Option<&'static Hook> {
    TABLES.into_iter().flatten().copied().flatten().find(|hook| matches(hook))
}

/// Returns the hook for the driver's function at `address`, if the library wraps it.
///
/// `name` has no version suffix. It selects the hook if the driver has one function body for
/// several names.
pub fn hook_for_address(name: &CStr, address: *mut c_void) -> Option<*mut c_void> {
    let wraps = |hook: &Hook| std::ptr::eq(hook.function.address_if_loaded(), address);
    let is_named = |hook: &Hook| hook.function.name.to_bytes().starts_with(name.to_bytes());
    let named = find(&mut |hook| wraps(hook) && is_named(hook));
    named.or_else(|| find(&mut |hook| wraps(hook))).map(|hook| hook.address.cast_mut())
}

/// Returns the hook of this name.
pub fn hook_of_name(name: &CStr) -> Option<&'static Hook> {
    find(&mut |hook| hook.function.name == name)
}

/// Declares hooks: exported functions that wrap driver functions of the same name. The body of a
/// hook gets the driver's function first, then the program's arguments.
macro_rules! hooks {
    ($library:ident: $($name:ident $arguments:tt => $body:expr;)*) => {
        $($crate::entry::table::hook! { $name $arguments => $body })*

        /// Places of the hooks in the table.
        #[allow(non_camel_case_types, clippy::enum_variant_names, reason = "named like the functions")]
        enum Place {
            $($name,)*
        }

        /// A hook contains its driver function instead of a reference to it, which would need a
        /// relocation for each of the hundreds of functions at load time.
        pub static HOOKS: [$crate::entry::table::Hook; [$(stringify!($name)),*].len()] = [
            $($crate::entry::table::Hook {
                function: $crate::entry::library::DriverFunction::new(
                    $crate::entry::library::named(concat!(stringify!($name), "\0")),
                    $crate::entry::library::LibraryId::$library,
                ),
                address: $name as *const std::ffi::c_void,
            },)*
        ];
    };
}
pub(crate) use hooks;

/// Declares one exported hook.
macro_rules! hook {
    ($name:ident ( $($argument:ident : $type:ty),* $(,)? ) => $body:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::cuda::Status {
            let address = HOOKS[Place::$name as usize].function.address();
            if address.is_null() {
                return $crate::cuda::NOT_SUPPORTED;
            }
            type Signature = unsafe extern "C" fn($($type),*) -> $crate::cuda::Status;
            // SAFETY: the driver's function of this name has this signature.
            let driver = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Signature>(address) };
            #[allow(unused_unsafe, reason = "a closure as body is not an unsafe function")]
            // SAFETY: the program fulfils the requirements of the driver's function.
            unsafe { $body(driver, $($argument),*) }
        }
    };
}
pub(crate) use hook;
