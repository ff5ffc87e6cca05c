// emulator_fiber.h: fibers: stacks of their own between which one OS thread switches in a few nanoseconds.
//
// Sanitizers are told of every switch. emulator.cpp, the only file that includes this, is compiled with
// -fsanitize=address like the rest, but never with -fsanitize=thread, which would see the emulator's own bookkeeping
// and the order that it happens to give: EMULATOR_TSAN says instead that the kernels are compiled so.
#ifndef CPU_EMULATOR_FIBER_H
#define CPU_EMULATOR_FIBER_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_read_range(void *address, unsigned long bytes);
void __tsan_write_range(void *address, unsigned long bytes);
void AnnotateBenignRaceSized(const char *file, int line, const volatile void *address, size_t bytes, const char *text);
}
#endif

#ifndef __x86_64__
#error "the emulator switches between fibers in x86-64 code"
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(EMULATOR_TSAN)
enum { FIBER_STACK = 256 << 10 };
#else
enum { FIBER_STACK = 64 << 10 };
#endif
enum { FIBER_GUARD = 4096 };

struct Fiber {
    char *stack;
    size_t bytes;
    void *sp;         // while it does not run
    void *fake_stack; // AddressSanitizer's
    void *tsan;       // what ThreadSanitizer takes for a thread
};

// Pushes what a function has to preserve, saves the stack pointer, goes over to another stack. It jumps to the return
// address: a `ret` would be mispredicted each time.
extern "C" void emulator_switch(void **saved, void *to);
asm(R"(
.text
.p2align 4
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size emulator_switch,.-emulator_switch
)");

static inline void fiber_switch(Fiber *from, Fiber *to) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->bytes);
#endif
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(to->tsan, 1); // 1: the switch itself orders nothing
#endif
    emulator_switch(&from->sp, to->sp);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from->fake_stack, NULL, NULL);
#endif
}

// What a fiber's function calls first.
static inline void fiber_started() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
}

// A fiber that will run `function`, which never returns. Never freed. False: no memory. `number` shifts the stack a
// little: at equal offsets the busy lines of all stacks would fall into the same sets of the caches.
static inline bool fiber_create(Fiber *fiber, void (*function)(), unsigned number) {
    void *mapping = mmap(NULL, FIBER_STACK + FIBER_GUARD, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    mprotect(mapping, FIBER_GUARD, PROT_NONE); // an overflow faults
    fiber->stack = (char *)mapping + FIBER_GUARD;
    fiber->bytes = FIBER_STACK;
    fiber->fake_stack = NULL;
    void **sp = (void **)(fiber->stack + FIBER_STACK - 64 - number % 61 * 320);
    *--sp = NULL; // as if called: the stack is 16-byte aligned before the return address
    *--sp = (void *)function;
    for (int i = 0; i < 6; i++) *--sp = NULL;
    fiber->sp = sp;
#ifdef EMULATOR_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
    return true;
}

// The calling thread's own stack, as a fiber to come back to.
static inline void fiber_of_thread(Fiber *fiber) {
#ifdef __SANITIZE_ADDRESS__
    pthread_attr_t attributes;
    void *stack = NULL;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &fiber->bytes);
    pthread_attr_destroy(&attributes);
    fiber->stack = (char *)stack;
#endif
#ifdef EMULATOR_TSAN
    fiber->tsan = __tsan_get_current_fiber();
#endif
    (void)fiber;
}

#endif
