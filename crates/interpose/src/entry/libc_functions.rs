//! Finds libc's own `dlopen`, `dlmopen`, `dlsym` and `dlvsym`, which this library replaces.
//!
//! A look-up by name would find this library's functions, or those of another preloaded library that
//! calls back into this one. So the search reads the symbol table of libc itself. It allocates nothing
//! and takes no lock but the loader's, because the first call may come from a constructor or from an
//! allocator that is not ready yet.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of libc, and its address once it is known.
#[derive(Debug)]
pub struct LibcFunction {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

/// Names of the libraries with these functions. Since glibc 2.34 they are in libc, before in libdl.
const LIBRARIES: [&CStr; 2] = [c"libc.so.6", c"libdl.so.2"];

impl LibcFunction {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    pub const fn name(&self) -> &'static CStr {
        self.name
    }

    /// Returns the address of libc's function, or of one that always returns null if libc does not
    /// have it.
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Acquire);
        if known.is_null() { self.find() } else { known }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let mut search = Search { name: self.name, found: std::ptr::null_mut() };
        // SAFETY: `visit` has the required signature and gets the address of `search`, which
        // outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        let found =
            if search.found.is_null() { (not_found as *const c_void).cast_mut() } else { search.found };
        self.address.store(found, Ordering::Release);
        found
    }
}

/// Answers every call as libc answers a look-up that fails.
extern "C" fn not_found() -> *mut c_void {
    std::ptr::null_mut()
}

struct Search {
    name: &'static CStr,
    found: *mut c_void,
}

/// An entry of the dynamic section.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// Looks the function up in a loaded object, if that is libc. Stops the iteration once it is found.
unsafe extern "C" fn visit(object: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: libc passes a description of a loaded object, and the address that `find` gave it.
    let (object, search) = unsafe { (&*object, &mut *data.cast::<Search>()) };
    // SAFETY: libc describes a loaded object, whose tables stay mapped while the loader's lock is held.
    let found = unsafe { SymbolTable::of(object).and_then(|table| table.find(search.name)) };
    search.found = found.unwrap_or(std::ptr::null_mut());
    c_int::from(found.is_some())
}

/// The exported symbols of a loaded object.
struct SymbolTable {
    base: *const u8,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    hash: *const u32,
}

impl SymbolTable {
    /// Returns the table of an object that is one of [`LIBRARIES`].
    ///
    /// # Safety
    /// `object` must describe an object that is loaded and stays so.
    unsafe fn of(object: &libc::dl_phdr_info) -> Option<Self> {
        // SAFETY: the loader's description names its own array of program headers.
        let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
        let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let base = std::ptr::with_exposed_provenance::<u8>(usize::try_from(object.dlpi_addr).ok()?);
        let mut entry = base.wrapping_add(usize::try_from(dynamic.p_vaddr).ok()?).cast::<Dynamic>();
        let (mut symbols, mut strings, mut hash, mut name) = (0, 0, 0, 0);
        loop {
            // SAFETY: the dynamic section of a loaded object is mapped, and ends with `DT_NULL`.
            let Dynamic { tag, value } = unsafe { entry.read() };
            match tag {
                DT_NULL => break,
                DT_STRTAB => strings = value,
                DT_SYMTAB => symbols = value,
                DT_GNU_HASH => hash = value,
                DT_SONAME => name = value,
                _ => {}
            }
            entry = entry.wrapping_add(1);
        }
        if symbols == 0 || strings == 0 || hash == 0 || name == 0 {
            return None;
        }
        // The loader replaces offsets by addresses, except in a section that it cannot write.
        let at = |value: u64| {
            let value = usize::try_from(value).ok()?;
            Some(if value < base.addr() {
                base.wrapping_add(value)
            } else {
                std::ptr::with_exposed_provenance(value)
            })
        };
        let table =
            Self { base, symbols: at(symbols)?.cast(), strings: at(strings)?.cast(), hash: at(hash)?.cast() };
        // SAFETY: `DT_SONAME` is the place of a NUL-terminated name in the object's strings.
        let name = unsafe { CStr::from_ptr(table.strings.wrapping_add(usize::try_from(name).ok()?)) };
        LIBRARIES.contains(&name).then_some(table)
    }

    /// Returns the address of an exported function.
    ///
    /// # Safety
    /// The object must still be loaded.
    unsafe fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let wanted = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        // SAFETY: the table begins with four numbers, which are followed by the Bloom filter of 64-bit
        // words, the buckets, and a chain entry for each symbol from `first` on.
        let [buckets, first, filter, _] = unsafe { self.hash.cast::<[u32; 4]>().read() };
        if buckets == 0 {
            return None;
        }
        let bucket = self.hash.wrapping_add(4 + 2 * filter as usize);
        let chain = bucket.wrapping_add(buckets as usize);
        // SAFETY: the remainder is below the number of buckets.
        let mut index = unsafe { bucket.wrapping_add((wanted % buckets) as usize).read() };
        if index < first {
            return None;
        }
        loop {
            // SAFETY: a chain begins with a symbol of the table and ends with an odd entry.
            let entry = unsafe { chain.wrapping_add((index - first) as usize).read() };
            if entry | 1 == wanted | 1 {
                // SAFETY: `index` is that of a symbol in the chain, so the symbol exists.
                let symbol = unsafe { &*self.symbols.wrapping_add(index as usize) };
                // SAFETY: a symbol's name is the place of a NUL-terminated string.
                let found = unsafe { CStr::from_ptr(self.strings.wrapping_add(symbol.st_name as usize)) };
                if found == name && symbol.st_shndx != 0 {
                    let address = self.base.wrapping_add(usize::try_from(symbol.st_value).ok()?);
                    return Some(address.cast_mut().cast());
                }
            }
            if entry & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}
