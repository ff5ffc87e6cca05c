// test_kernels.c: every operation of the device under test against the CPU's, over shapes and options.
//
//   test_kernels [--set small|quick|full] [--largest SIZE] [--case NAME]... [--seed N] [--runs N] [--list]
//                [--against-itself]
//
//   --set      quick: every level of the factors of operations.h, and every pair of levels that is cheap to have, but
//              pairs of two sizes; full: every combination; small: every level of what is cheap, for sanitizers
//   --largest  no case of more elements, about
//   --case     a case's name as printed, or how it begins
//   --seed     of the inputs
//   --runs     of a case on the device, each with another order of threads
//   --list     names only
//   --against-itself  the CPU's operations are the device under test: checks this program
//
// Prints a line for each case: its errors in the norm, bytes of global memory, time. Exit code 1 if any failed.
#include "operations.h"

// Factors that make a case large; quick leaves out the pairs of two of them.
static bool is_size(int factor) {
    return factor >= F_T && factor <= F_N;
}

typedef struct {
    const char *name;
    double largest;      // size of a case
    double largest_pair; // of a case that adds a pair of levels, but no level
    bool all;
} Set;

static const Set sets[] = {{"small", 6e4, 0.0, false}, {"quick", 8e6, 5e5, false}, {"full", 6e7, 6e7, true}};

enum { MAX_CASES = 20000, MAX_RUNS = 64, PLACES = FACTORS * MAX_LEVELS };

// All combinations of an operation's levels up to a size, as indices of levels.
typedef struct {
    int count;
    unsigned char (*level)[FACTORS];
    double *size;
    bool *chosen;
} Combinations;

static void case_from(Case *c, const Operation *operation, const unsigned char *level) {
    memset(c, 0, sizeof *c);
    c->operation = operation;
    for (int f = 0; f < FACTORS; f++)
        c->value[f] = operation->levels[f].count ? operation->levels[f].level[level[f]] : 1;
}

static void combine(Combinations *all, const Operation *operation, double largest) {
    unsigned char level[FACTORS] = {0};
    all->count = 0;
    for (;;) {
        static Case c;
        case_from(&c, operation, level);
        double size = operation->size(&c);
        if (size <= largest) {
            if (all->count == MAX_CASES) die("too many cases");
            memcpy(all->level[all->count], level, sizeof level);
            all->size[all->count] = size;
            all->chosen[all->count++] = false;
        }
        int f = FACTORS - 1;
        while (f >= 0 && ++level[f] >= (operation->levels[f].count ? operation->levels[f].count : 1)) level[f--] = 0;
        if (f < 0) return;
    }
}

// What a combination would add to those chosen: levels, and pairs of levels, that none of them has.
typedef struct {
    int levels, pairs;
} Gain;

// With `mark` they are covered from here on.
static Gain gain(bool (*covered)[PLACES], const unsigned char *level, const Operation *operation, bool mark) {
    Gain result = {0, 0};
    for (int f = 0; f < FACTORS; f++)
        for (int g = f; g < FACTORS; g++) {
            if (operation->levels[f].count == 0 || operation->levels[g].count == 0) continue;
            if (f != g && is_size(f) && is_size(g)) continue;
            bool *place = &covered[f * MAX_LEVELS + level[f]][g * MAX_LEVELS + level[g]];
            *(f == g ? &result.levels : &result.pairs) += !*place;
            if (mark) *place = true;
        }
    return result;
}

// Greedily: the combination that covers most, of those the cheapest.
static void choose(Combinations *all, const Operation *operation, double largest_pair) {
    static bool covered[PLACES][PLACES];
    memset(covered, 0, sizeof covered);
    for (;;) {
        int best = -1;
        Gain most = {0, 0};
        for (int i = 0; i < all->count; i++) {
            Gain g = gain(covered, all->level[i], operation, false);
            if (g.levels == 0 && (g.pairs == 0 || all->size[i] > largest_pair)) continue;
            if (best >= 0) {
                int order = g.levels != most.levels ? g.levels - most.levels : g.pairs - most.pairs;
                if (order < 0 || (order == 0 && all->size[i] >= all->size[best])) continue;
            }
            best = i;
            most = g;
        }
        if (best < 0) return;
        gain(covered, all->level[best], operation, true);
        all->chosen[best] = true;
    }
}

typedef struct {
    const Set *set;
    const char *wanted[64];
    int n_wanted, runs;
    double largest;
    uint64_t seed;
    bool list, against_itself;
} Arguments;

static void usage(const char *problem) {
    fprintf(stderr, "test_kernels: %s\n", problem);
    exit(2);
}

static Arguments parse(int argc, char **argv) {
    Arguments a;
    memset(&a, 0, sizeof a);
    a.set = &sets[1];
    a.runs = 4;
    a.seed = 1337;
    a.largest = INFINITY;
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        if (strcmp(flag, "--list") == 0) {
            a.list = true;
        } else if (strcmp(flag, "--against-itself") == 0) {
            a.against_itself = true;
        } else if (i + 1 == argc) {
            usage("a value is missing, or the flag is unknown");
        } else if (strcmp(flag, "--set") == 0) {
            a.set = NULL;
            i++;
            for (size_t k = 0; k < sizeof sets / sizeof sets[0]; k++)
                if (strcmp(argv[i], sets[k].name) == 0) a.set = &sets[k];
            if (a.set == NULL) usage("--set is small, quick or full");
        } else if (strcmp(flag, "--case") == 0) {
            if (a.n_wanted == 64) usage("too many cases");
            a.wanted[a.n_wanted++] = argv[++i];
        } else if (strcmp(flag, "--seed") == 0) {
            a.seed = strtoull(argv[++i], NULL, 10);
        } else if (strcmp(flag, "--largest") == 0) {
            a.largest = atof(argv[++i]);
        } else if (strcmp(flag, "--runs") == 0) {
            a.runs = atoi(argv[++i]);
        } else {
            usage("the flag is unknown");
        }
    }
    if (a.runs < 1 || a.runs > MAX_RUNS) usage("--runs is from 1 to 64");
    return a;
}

static bool is_wanted(const Arguments *a, const char *name) {
    for (int i = 0; i < a->n_wanted; i++)
        if (strncmp(name, a->wanted[i], strlen(a->wanted[i])) == 0) return true;
    return a->n_wanted == 0;
}

// Runs take turns: ascending, descending, random, and the first again; later ones are random all.
static const char *run_order(char *text, size_t room, int run, uint64_t seed) {
    static const char *const fixed[4] = {"ascending", "descending", NULL, "ascending"};
    if (run < 4 && fixed[run] != NULL)
        snprintf(text, room, "%s", fixed[run]);
    else
        snprintf(text, room, "random:%llu", (unsigned long long)(seed % 1000000 + (uint64_t)run));
    return text;
}

int main(int argc, char **argv) {
    Arguments a = parse(argc, argv);
    const OpsTable *device = a.against_itself ? &cpu_table : &device_table;
    char text[MAX_RUNS][32];
    const char *orders[MAX_RUNS];
    for (int run = 0; run < a.runs; run++) orders[run] = run_order(text[run], sizeof text[run], run, a.seed);
    Combinations all;
    all.level = (unsigned char(*)[FACTORS])checked_malloc(MAX_CASES * sizeof *all.level);
    all.size = (double *)checked_malloc(MAX_CASES * sizeof(double));
    all.chosen = (bool *)checked_malloc(MAX_CASES * sizeof(bool));
    if (!a.list) printf("%s against the CPU, inputs of seed %llu\n", device->device, (unsigned long long)a.seed);
    double start = seconds_now();
    int passed = 0, failures = 0;
    for (int o = 0; o < OPERATIONS; o++) {
        combine(&all, &operations[o], fmin(a.set->largest, a.largest));
        if (!a.set->all) choose(&all, &operations[o], a.set->largest_pair);
        for (int i = 0; i < all.count; i++) {
            static Case c;
            case_from(&c, &operations[o], all.level[i]);
            if (!(a.set->all || all.chosen[i]) || !is_wanted(&a, case_name(&c))) continue;
            if (a.list) {
                printf("%s\n", case_name(&c));
                continue;
            }
            c.seed = random_key(a.seed, RANDOM_INIT, (uint64_t)o, (uint64_t)i);
            if (run_case(&cpu_table, device, &c, orders, a.runs))
                passed++;
            else
                failures++;
        }
    }
    free(all.level);
    free(all.size);
    free(all.chosen);
    if (a.list) return 0;
    printf("%.1f seconds\n%d passed, %d failed\n", seconds_now() - start, passed, failures);
    return failures > 0 || passed == 0;
}
